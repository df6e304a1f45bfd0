package alerts

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/system/notify/logging"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// table keeps alerts in memory, and fails so many times first.
type table struct {
	rows  map[string]string
	fails int
	asked []string // subjects, in order
}

func (t *table) RaiseIncident(_ context.Context, kind, key, incident, details string) (bool, error) {
	t.asked = append(t.asked, key)
	if t.fails > 0 {
		t.fails--
		return false, errors.New("away")
	}
	id := kind + " " + key + " " + incident
	_, have := t.rows[id]
	t.rows[id] = details
	return !have, nil
}

type counts map[string]int

func (c counts) Alert(kind string) { c[kind]++ }

var dead = Alert{
	Kind: MailDead, Subject: "ticket:b1", Occurrence: "version 7", EventID: "e1", Attempts: 4,
	Detail: "550 <anna@example.test> unknown\x00",
}

func TestTheSameAlertIsToldOnce(t *testing.T) {
	var log bytes.Buffer
	tab, c := &table{rows: map[string]string{}}, counts{}
	r := New(tab, logging.New(&log, slog.LevelInfo), c, "")
	for range 3 {
		require.NoError(t, r.Raise(t.Context(), dead))
	}
	again := dead
	again.Occurrence = "version 9"
	fresh, err := r.RaiseNew(t.Context(), dead, again)
	require.NoError(t, err)
	require.Equal(t, 1, fresh)
	require.Equal(t, counts{"mail-dead": 2}, c)
	require.Equal(t, 2, strings.Count(log.String(), `"msg":"alert"`))
	require.NotContains(t, log.String(), "anna@")
	require.NotContains(t, tab.rows["mail-dead ticket:b1 version 7"], "\x00", "a text column takes no NUL")
}

func TestAnAlertThatIsNotInTheTableIsNotTold(t *testing.T) {
	c := counts{}
	r := New(&table{rows: map[string]string{}, fails: 1}, slog.New(slog.DiscardHandler), c, "")
	require.Error(t, r.Raise(t.Context(), dead))
	require.Empty(t, c)
	require.NoError(t, r.Raise(t.Context(), dead))
	require.Equal(t, counts{"mail-dead": 1}, c)
}

// Two transactions that raise the same alerts must not wait for each other
// crosswise; and thousands of mails of one campaign are one alert.
func TestAlertsOfATransactionAreRaisedInOrderAndOnce(t *testing.T) {
	tab, c := &table{rows: map[string]string{}}, counts{}
	r := New(&table{}, slog.New(slog.DiscardHandler), c, "")
	var given []Alert
	for _, subject := range []string{"campaign:b", "campaign:a", "campaign:b"} {
		given = append(given, Alert{Kind: MailExpired, Subject: subject, Occurrence: "expired"})
	}
	tell, err := r.RaiseIn(t.Context(), tab, given...)
	require.NoError(t, err)
	require.Equal(t, []string{"campaign:a", "campaign:b"}, tab.asked)
	require.Equal(t, "campaign:b", given[0].Subject, "the caller's list is left as it is")
	require.Empty(t, c, "nothing is told before the commit")
	tell()
	require.Equal(t, counts{"mail-expired": 2}, c)
}

func TestWebhookGetsEachAlertMasked(t *testing.T) {
	got := make(chan map[string]any, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		var m map[string]any
		_ = json.Unmarshal(body, &m)
		got <- m
	}))
	defer srv.Close()
	r := New(&table{rows: map[string]string{}}, slog.New(slog.DiscardHandler), counts{}, srv.URL)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	require.NoError(t, r.Raise(t.Context(), dead))
	m := <-got
	require.Equal(t, "ticket:b1", m["subject"])
	require.NotContains(t, m["detail"], "anna@")
	cancel()
	require.NoError(t, <-done)
	r.hook.client.CloseIdleConnections()
}

// A webhook that hangs holds nobody: what it misses is in the table.
func TestRaiseNeverWaitsForTheWebhook(t *testing.T) {
	tab := &table{rows: map[string]string{}}
	r := New(tab, slog.New(slog.DiscardHandler), counts{}, "http://127.0.0.1:1") // nobody runs the queue
	for i := range 1000 {
		a := dead
		a.Occurrence = "version " + string(rune('a'+i%26)) + strings.Repeat("x", i/26)
		require.NoError(t, r.Raise(t.Context(), a))
	}
	require.Len(t, tab.rows, 1000)
}
