package processes

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/twmb/franz-go/pkg/kfake"

	"mailproof/infra"
	broker "mailproof/infra/kafka"
)

// kfakeCluster stands in for Kafka inside this process where Java or Kafka's
// jars are missing. It speaks the protocol, but has no process to kill, and what
// it holds dies with the caller; a report must say that it ran.
type kfakeCluster struct {
	cluster *kfake.Cluster
	version string
}

var _ infra.Kafka = (*kfakeCluster)(nil)

const kfakeModule = "github.com/twmb/franz-go/pkg/kfake"

func startKfake(e *environment) (*kfakeCluster, error) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	if err != nil {
		return nil, fmt.Errorf("start kfake in Kafka's place: %w", err)
	}
	e.progress("kafka", "kfake stands in for it: Java or Kafka's jars are missing")
	return &kfakeCluster{cluster: cluster, version: moduleVersion(kfakeModule)}, nil
}

// moduleVersion is the version of a module that is linked into this binary.
func moduleVersion(path string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range info.Deps {
		if m.Path == path {
			return m.Version
		}
	}
	return "unknown"
}

func (k *kfakeCluster) Brokers() []string { return k.cluster.ListenAddrs() }

func (*kfakeCluster) Kind() string { return "kfake" }

func (k *kfakeCluster) CreateTopic(ctx context.Context, name string, partitions int) error {
	return broker.CreateTopic(ctx, k.Brokers(), name, partitions)
}

func (*kfakeCluster) Name() string { return "kafka" }

// PID is 0: there is no process of its own.
func (*kfakeCluster) PID() int { return 0 }

// Log is empty: it writes none.
func (*kfakeCluster) Log() string { return "" }

func (*kfakeCluster) Running() bool { return true }

func (*kfakeCluster) Kill(context.Context) error { return unsupported("kill") }

func (*kfakeCluster) Pause(context.Context) error { return unsupported("pause") }

func (*kfakeCluster) Resume(context.Context) error { return unsupported("resume") }

func (*kfakeCluster) Restart(context.Context) error { return unsupported("restart") }

func unsupported(act string) error {
	return fmt.Errorf("%s kfake, which runs inside the caller: %w", act, infra.ErrUnsupported)
}
