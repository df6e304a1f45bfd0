package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/smtp"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func execute(ctx context.Context, out io.Writer, args ...string) error {
	root := &cobra.Command{Use: "x", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(Commands()...)
	root.SetOut(out)
	root.SetErr(out)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// TestFakeThenJudge runs the server as a user would, sends with retries, and
// judges from the exported ledger alone.
// TestAnAddressInUse says which flag chooses another.
func TestAnAddressInUse(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer busy.Close()
	addr := busy.Addr().String()
	require.ErrorContains(t, execute(t.Context(), io.Discard, "fake", "smtp", "--smtp", addr), "--smtp and --http choose other")
	require.ErrorContains(t, execute(t.Context(), io.Discard, "fake", "resend", "--listen", addr), "--listen and --control choose other")
}

func TestFakeThenJudge(t *testing.T) {
	dir := t.TempDir()
	rules, ledger, keys := filepath.Join(dir, "rules.json"), filepath.Join(dir, "ledger.jsonl"), filepath.Join(dir, "keys.txt")
	require.NoError(t, os.WriteFile(rules, []byte(`[{"match":{"key":"k1","nth":1},"action":{"kind":"drop","stage":"stored"}}]`), 0o600))
	require.NoError(t, os.WriteFile(keys, []byte("k1\nk2\nk3\n"), 0o600))

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := execute(ctx, w, "fake", "smtp", "--smtp", "127.0.0.1:0", "--http", "", "--rules", rules, "--ledger", ledger)
		_ = w.CloseWithError(err)
		done <- err
	}()
	var first [256]byte
	n, err := r.Read(first[:])
	require.NoError(t, err)
	go func() { _, _ = io.Copy(io.Discard, r) }()
	addr := strings.Fields(string(first[:n]))[1]
	for _, k := range []string{"k1", "k1", "k2"} {
		_ = smtp.SendMail(addr, nil, "a@x.test", []string{"b@x.test"}, []byte("X-Dedupe-Key: "+k+"\r\n\r\nhi\r\n"))
	}
	cancel()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		require.Fail(t, "the server does not stop")
	}

	var out bytes.Buffer
	err = execute(context.Background(), &out, "judge", "--keys", keys, "--ledger", ledger)
	var v Verdict
	require.True(t, errors.As(err, &v))
	require.Equal(t, 1, v.ExitCode())
	require.Contains(t, out.String(), "3 expected by key: 1 once, 1 lost, 1 doubled, 0 unexpected")
	require.Contains(t, out.String(), "answer to a stored mail was lost")

	require.NoError(t, os.WriteFile(keys, []byte("k2\n"), 0o600))
	out.Reset()
	require.Error(t, execute(context.Background(), &out, "judge", "--keys", keys, "--ledger", ledger, "--json"))
	require.Contains(t, out.String(), `"unexpected"`)

	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	err = execute(context.Background(), &out, "judge", "--keys", keys, "--ledger", empty)
	require.True(t, errors.As(err, &v))
	require.Equal(t, 3, v.ExitCode())
}

func TestWrongArgumentsAreNamed(t *testing.T) {
	for want, args := range map[string][]string{
		"--user":      {"fake", "smtp", "--user", "nobody"},
		"rules":       {"fake", "smtp", "--rules", "/nonexistent"},
		"mode":        {"fake", "smtp", "--mode", "x", "--smtp", "127.0.0.1:0"},
		"--by":        {"judge", "--keys", "/dev/null", "--ledger", "/dev/null", "--by", "x"},
		"required":    {"judge"},
		"unknown":     {"judge", "extra"},
		"no keys":     {"judge", "--keys", "/dev/null", "--ledger", "/dev/null"},
		"no such fil": {"judge", "--keys", "/nonexistent", "--ledger", "/dev/null"},
	} {
		require.ErrorContains(t, execute(context.Background(), io.Discard, args...), want, "%v", args)
	}
}

func TestDemo(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, execute(context.Background(), &out, "demo", "--mails", "60"))
	require.Contains(t, out.String(), "careful")
}
