package observe

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A group that never committed is behind by everything, one that committed by
// the rest, and a broker that is away is an error and no zero.
func TestLag(t *testing.T) {
	t.Parallel()
	broker, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, "events"))
	require.NoError(t, err)
	defer broker.Close()
	client, err := kgo.NewClient(kgo.SeedBrokers(broker.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	defer client.Close()
	for range 5 {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: "events", Partition: 1, Value: []byte("x")}).FirstErr())
	}
	lag := Lag{Brokers: broker.ListenAddrs(), Group: "readers", Topic: "events", ClientID: "test"}
	defer lag.Close()
	seen, err := lag.Ask(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 0, 1: 5}, seen)

	commits := kadm.Offsets{}
	commits.AddOffset("events", 1, 3, -1)
	_, err = kadm.NewClient(client).CommitOffsets(t.Context(), "readers", commits)
	require.NoError(t, err)
	seen, err = lag.Ask(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 0, 1: 2}, seen)

	missing := Lag{Brokers: broker.ListenAddrs(), Group: "readers", Topic: "nobody-made-it", ClientID: "test"}
	defer missing.Close()
	_, err = missing.Ask(t.Context())
	require.Error(t, err)
}
