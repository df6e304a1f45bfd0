package cli

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFakeResendThenJudge runs the API as a user would, sends with a retry, and
// judges from the exported ledger alone.
func TestFakeResendThenJudge(t *testing.T) {
	dir := t.TempDir()
	rules, ledger, keys := filepath.Join(dir, "rules.json"), filepath.Join(dir, "ledger.jsonl"), filepath.Join(dir, "keys.txt")
	require.NoError(t, os.WriteFile(rules, []byte(`[{"match":{"key":"k1","nth":1},"action":{"kind":"drop","stage":"stored"}}]`), 0o600))
	require.NoError(t, os.WriteFile(keys, []byte("k1\nk2\n"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := execute(ctx, w, "fake", "resend", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--seed", "7",
			"--rules", rules, "--ledger", ledger, "--api-key", "re_1", "--api-key", "re_2:sending")
		_ = w.CloseWithError(err)
		done <- err
	}()
	out := bufio.NewReader(r)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	url := strings.Fields(line)[1]
	go func() { _, _ = io.Copy(io.Discard, out) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, k := range []string{"k1", "k1", "k2"} {
		req, err := http.NewRequest("POST", url+"/emails", strings.NewReader(`{"from":"a@x.test","to":"b@x.test","subject":"x","text":"`+k+`"}`))
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer re_2")
		req.Header.Set("Idempotency-Key", k)
		if resp, err := client.Do(req); err == nil {
			require.Equal(t, 200, resp.StatusCode)
			resp.Body.Close()
		}
	}
	cancel()
	require.NoError(t, <-done)
	var report strings.Builder
	require.NoError(t, execute(context.Background(), &report, "judge", "--keys", keys, "--ledger", ledger))
	require.Contains(t, report.String(), "2 expected by key: 2 once, 0 lost, 0 doubled")
	require.Contains(t, report.String(), "3 tries, 1 of them ended without an answer")
}

func TestFakeResendBadFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--rules", "nowhere.json"},
		{"--api-key", ":full"},
		{"--api-key", "re_1:root"},
		{"--payload-compare", "loosely"},
		{"--listen", "nowhere:1"},
		{"--key-scope", "world"},
	} {
		err := execute(context.Background(), io.Discard, append([]string{"fake", "resend", "--listen", "127.0.0.1:0"}, args...)...)
		require.Error(t, err, args)
	}
}
