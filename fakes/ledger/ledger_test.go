package ledger

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func put(l *Ledger, key, to, dedup string) Attempt {
	r := l.Begin(Attempt{Recipient: to})
	r.Update(func(a *Attempt) { a.Key, a.DotAt = key, 1 })
	r.Store(dedup, 2)
	r.Finish(3, func(a *Attempt) { a.ReplyWritten, a.Code, a.Reply = true, 250, "250 ok" })
	return r.Get()
}

// TestOldRowsAreReadBackFromTheFile holds 256 rows in memory and reads 2,000.
func TestOldRowsAreReadBackFromTheFile(t *testing.T) {
	l := New(256)
	defer func() { require.NoError(t, l.Close()) }()
	const n = 2000
	for i := range n {
		put(l, fmt.Sprint("k", i), "a@x", "")
	}
	require.NoError(t, l.Err())
	require.NotEmpty(t, l.finished.spilled)
	require.LessOrEqual(t, len(l.finished.chunks), 3)
	rows, err := l.Snapshot()
	require.NoError(t, err)
	require.Len(t, rows, n)
	for i, a := range rows {
		require.EqualValues(t, i+1, a.ID)
		require.EqualValues(t, i+1, a.Seq)
		require.Equal(t, fmt.Sprint("k", i), a.Key)
	}
	for _, seq := range []int64{-1, 0, 1, 255, 256, 257, n - 1, n, n + 7} {
		got, err := l.Since(seq)
		require.NoError(t, err)
		require.Len(t, got, int(n-max(0, min(seq, n))), "since %d", seq)
	}
	put(l, "k7", "a@x", "")
	running := l.Begin(Attempt{Key: "k7"})
	of, err := l.Of("k7")
	require.NoError(t, err)
	require.Equal(t, []int64{8, n + 1, n + 2}, []int64{of[0].ID, of[1].ID, of[2].ID})
	require.True(t, of[2].Open())
	running.Finish(1, nil)
	v, err := l.Verdict("k7")
	require.NoError(t, err)
	require.Equal(t, "doubled", v.Verdict)
	require.Equal(t, 3, v.Attempts)
	l.Reset()
	rows, err = l.Snapshot()
	require.NoError(t, err)
	require.Empty(t, rows)
	require.Equal(t, Totals{}, l.Totals())
}

func TestCopiesAreCountedPerKeyAndRecipient(t *testing.T) {
	l := New(0)
	require.Equal(t, 1, put(l, "k", "a@x", "").Copy)
	require.Equal(t, 2, put(l, "k", "a@x", "").Copy)
	require.Equal(t, 1, put(l, "k", "b@x", "").Copy)
	require.Equal(t, 1, put(l, "", "a@x", "").Copy)
	require.Equal(t, 1, put(l, "", "a@x", "").Copy, "a mail without key and Message-ID is like no other")
	require.EqualValues(t, 1, l.Totals().Doubled)
}

// TestOneOfManyAtOnceIsStored: the decision to store and its counting are one.
func TestOneOfManyAtOnceIsStored(t *testing.T) {
	l := New(0)
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() { put(l, "k", "a@x", "k") })
	}
	wg.Wait()
	require.EqualValues(t, 1, l.Totals().Stored)
	require.EqualValues(t, 99, l.Totals().Deduplicated)
	require.EqualValues(t, 100, l.Totals().Accepted)
}

func TestAFinishedRowNeverChanges(t *testing.T) {
	l := New(0)
	r := l.Begin(Attempt{})
	r.Finish(5, nil)
	require.False(t, r.Update(func(a *Attempt) { a.Stage = "dot" }))
	stored, dup := r.Store("", 6)
	require.False(t, stored || dup)
	r.Finish(7, func(a *Attempt) { a.ReplyWritten = true })
	got := l.open
	require.Empty(t, got)
	rows, err := l.Snapshot()
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.True(t, rows[0].ClosedWithoutStoring)
	require.EqualValues(t, 5, rows[0].To)
	require.False(t, rows[0].ReplyWritten)
}

func TestASlowSubscriberMissesNothing(t *testing.T) {
	l := New(256)
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	put(l, "before", "a@x", "")
	ch := l.Subscribe(ctx)
	for i := range 2000 {
		put(l, fmt.Sprint(i), "a@x", "")
	}
	for i := range 2000 {
		require.Equal(t, fmt.Sprint(i), (<-ch).Key)
	}
	cancel()
	_, ok := <-ch
	require.False(t, ok)
}

func TestVerdictWords(t *testing.T) {
	base := Attempt{Seq: 1, Key: "k", Recipient: "a@x", DotAt: 1}
	with := func(f func(*Attempt)) Attempt { a := base; f(&a); return a }
	stored := with(func(a *Attempt) { a.Stored = true })
	for _, tc := range []struct {
		want string
		rows []Attempt
	}{
		{"unseen", nil},
		{"absent", []Attempt{base}},
		{"running", []Attempt{base, with(func(a *Attempt) { a.Seq = 0 })}},
		{"once", []Attempt{base, stored}},
		{"once", []Attempt{stored, with(func(a *Attempt) { a.Stored, a.Recipient = true, "b@x" })}},
		{"doubled", []Attempt{stored, stored}},
	} {
		v := Judge("k", tc.rows)
		require.Equal(t, tc.want, v.Verdict)
		require.Equal(t, tc.want == "absent", v.ProvenAbsent)
	}
}

func TestFilter(t *testing.T) {
	a := Attempt{Key: "k", Recipient: "Ann@x", Session: 4, Stored: true, Copy: 2, Subject: "Your Ticket"}
	for q, want := range map[string]bool{
		"": true, "key=k": true, "key=j": false, "recipient=ann@x": true, "session=4": true, "session=5": false,
		"stored=true": true, "stored=false": false, "doubled=1": true, "struck=true": false, "q=ticket": true, "q=zebra": false,
	} {
		v, err := url.ParseQuery(q)
		require.NoError(t, err)
		f, err := ParseFilter(v)
		require.NoError(t, err)
		require.Equal(t, want, f.Match(a), q)
	}
	for _, q := range []string{"stord=true", "stored=maybe", "session=x"} {
		v, _ := url.ParseQuery(q)
		_, err := ParseFilter(v)
		require.Error(t, err, q)
	}
}

func TestLogLines(t *testing.T) {
	for want, a := range map[string]Attempt{
		"running":   {},
		"stored":    {Seq: 1, Stored: true},
		"duplicate": {Seq: 1, Deduplicated: true},
		"deferred":  {Seq: 1, ReplyWritten: true, Code: 451},
		"rejected":  {Seq: 1, ReplyWritten: true, Code: 550},
		"discarded": {Seq: 1, ReplyWritten: true, Code: 250},
		"closed":    {Seq: 1, Stage: "body"},
	} {
		require.Equal(t, want, a.Log().Event)
	}
}
