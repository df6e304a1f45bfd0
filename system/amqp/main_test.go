package amqp

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/provider"
)

// The tests run against one real RabbitMQ node. It is started by the first test
// that asks for it.
var (
	stackMu sync.Mutex
	stack   infra.Stack
	logDir  string
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	code := m.Run()
	if err := stopStack(); err != nil {
		fmt.Fprintln(os.Stderr, "stop RabbitMQ:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines are left:", err)
		code = 1
	}
	os.Exit(code)
}

func rabbit(t testing.TB) infra.RabbitMQ {
	t.Helper()
	stackMu.Lock()
	defer stackMu.Unlock()
	if stack == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		dir, err := os.MkdirTemp("", "amqptest")
		require.NoError(t, err)
		logDir = dir
		p, err := provider.Select(provider.Auto)
		require.NoError(t, err)
		stack, err = p.Start(ctx, infra.Spec{LogDir: filepath.Join(dir, "logs"), RabbitMQ: true, RabbitNodes: 1})
		require.NoError(t, err)
	}
	return stack.RabbitMQ()
}

func stopStack() error {
	stackMu.Lock()
	defer stackMu.Unlock()
	if stack == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := stack.Stop(ctx)
	if err == nil {
		err = os.RemoveAll(logDir)
	}
	return err
}

func brokerURL(t *testing.T) string {
	t.Helper()
	return rabbit(t).URLs("")[0]
}

// vhost makes a virtual host for tests whose names are fixed by contract.
func vhost(t *testing.T) (name string, url string) {
	t.Helper()
	r := rabbit(t)
	name = fmt.Sprint("t", names.Add(1))
	require.NoError(t, r.CreateVhost(t.Context(), name))
	return name, r.URLs(name)[0]
}
