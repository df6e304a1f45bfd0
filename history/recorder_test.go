package history_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

var meta = history.Meta{Scenario: "t6.7", Policy: "hold", Server: "plain", Seed: 7}

func create(t *testing.T) (*history.Recorder, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t6.7", history.FileName)
	r, err := history.Create(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r, path
}

func op(client, key string, call, ret int64) history.Op {
	return history.Op{
		Client: client, Name: "confirm", Booking: key, Key: key, Recipient: key + "@example.test",
		Intended: call, Call: call, Return: ret, Outcome: history.OpOK,
	}
}

func TestRecordedIsLoaded(t *testing.T) {
	t.Parallel()
	r, path := create(t)
	require.NoError(t, r.Meta(meta))
	require.NoError(t, r.Phase("baseline"))
	require.NoError(t, r.Op(op("c1", "b2", 200, 300)))
	require.NoError(t, r.Op(op("c1", "b1", 300, 400)))
	require.NoError(t, r.Op(op("c2", "b0", 100, 500)))
	require.NoError(t, r.Process(history.Process{Name: "notifyd-1", PID: 42, Event: "killed"}))
	require.NoError(t, r.Attempt(history.Attempt{ID: 2, From: 600, To: 700, DotAt: 650, Stored: true}))
	require.NoError(t, r.Attempt(history.Attempt{ID: 1, From: 500, To: 700}))
	require.NoError(t, r.Change(history.Change{
		Database: "notify", Table: "public.notifications", Op: "INSERT", Order: 1,
		CommitAt: time.Now().Add(time.Second), New: map[string]string{"payload": `{"a":"<b>"}`},
	}))
	require.NoError(t, r.Fault(history.Fault{Name: "kill", Outcome: history.Skipped, Reason: "no rights"}))
	require.NoError(t, r.Note("%d mails", 3))
	require.NoError(t, r.Final(history.Final{Pending: map[string]string{}}))
	require.NoError(t, r.Close())
	require.ErrorIs(t, r.Note("late"), history.ErrClosed)

	h, err := history.Load(path)
	require.NoError(t, err)
	require.Empty(t, h.Problems)
	require.Equal(t, "t6.7", h.Meta.Scenario)
	require.Equal(t, []string{"b0", "b2", "b1"}, []string{h.Ops[0].Key, h.Ops[1].Key, h.Ops[2].Key})
	require.Equal(t, []int64{1, 2}, []int64{h.Attempts[0].ID, h.Attempts[1].ID})
	require.Equal(t, `{"a":"<b>"}`, h.Changes[0].New["payload"])
	require.InDelta(t, history.Now()+int64(time.Second), h.Changes[0].At, float64(time.Second))
	require.NotZero(t, h.Processes[0].At)
	require.Equal(t, "3 mails", h.Notes[0].Text)
	require.NotNil(t, h.Final)
	from, to, ok := h.Phase("baseline")
	require.True(t, ok)
	require.Less(t, from, to)
}

func campaignOp(name string, c *history.Campaign) history.Op {
	o := op("", "campaign:spring", 10, 20)
	o.Name, o.Campaign = name, c
	return o
}

func TestCampaignsAndDepthsAreLoaded(t *testing.T) {
	t.Parallel()
	r, path := create(t)
	require.NoError(t, r.Meta(meta))
	made := campaignOp("campaign", &history.Campaign{ID: "spring", Recipients: []string{"a@x"}, Keys: []string{"k"}, New: 1})
	require.NoError(t, r.Op(made))
	for _, d := range []history.Record{
		{T: 90, Kind: history.KindDepth, Depth: &history.Depth{Queue: "q", Ready: 0}},
		{T: 80, Kind: history.KindDepth, Depth: &history.Depth{Queue: "q", Ready: 7}},
	} {
		require.NoError(t, r.Record(d))
	}
	require.NoError(t, r.Close())
	h, err := history.Load(path)
	require.NoError(t, err)
	require.Empty(t, h.Problems)
	require.Equal(t, []history.Op{made}, h.Ops)
	require.Equal(t, []history.Depth{{Queue: "q", Ready: 7, At: 80}, {Queue: "q", Ready: 0, At: 90}}, h.Depths)
}

func TestDifferenceToAnUnknownRowIsAProblem(t *testing.T) {
	t.Parallel()
	h := history.FromRecords([]history.Record{{T: 1, Kind: history.KindChange, Change: &history.Change{
		Database: "d", Table: "t", Op: "UPDATE", Row: "a", Delta: true, Order: 3, CommitAt: time.Unix(1, 0),
	}}})
	require.Len(t, h.Problems, 1)
	require.EqualError(t, h.Problems[0], "malformed record: change 3 of t is a difference to a row that the log does not hold")
}

func TestRefusesMalformedRecords(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		rec  history.Record
		want string
	}{
		"no time":             {history.Record{Kind: history.KindNote, Note: &history.Note{}}, "not a monotonic time"},
		"negative time":       {history.Record{T: -1, Kind: history.KindNote, Note: &history.Note{}}, "not a monotonic time"},
		"wrong part":          {history.Record{T: 1, Kind: history.KindNote, Phase: &history.Phase{}}, "that part is not set"},
		"two parts":           {history.Record{T: 1, Kind: history.KindNote, Note: &history.Note{}, Phase: &history.Phase{}}, "2 parts"},
		"return before call":  {record(op("", "k", 20, 10)), "before it was called"},
		"no key":              {record(op("", "", 10, 20)), "key must be set"},
		"call before return":  {record(op("c1", "k", 50, 60)), "while an operation was open"},
		"second meta":         {history.Record{T: 1, Kind: history.KindMeta, Meta: withWall(meta)}, "second meta"},
		"dot outside":         {history.Record{T: 1, Kind: history.KindAttempt, Attempt: &history.Attempt{From: 5, To: 9, DotAt: 10}}, "dot lies outside"},
		"stored without dot":  {history.Record{T: 1, Kind: history.KindAttempt, Attempt: &history.Attempt{From: 5, To: 9, Stored: true}}, "never read"},
		"stored and absent":   {history.Record{T: 1, Kind: history.KindAttempt, Attempt: &history.Attempt{From: 5, To: 9, DotAt: 9, Stored: true, ClosedWithoutStoring: true}}, "closed without storing"},
		"skip, no reason":     {history.Record{T: 1, Kind: history.KindFault, Fault: &history.Fault{Name: "f", Outcome: history.Skipped}}, "without a reason"},
		"fault, no start":     {history.Record{T: 1, Kind: history.KindFault, Fault: &history.Fault{Name: "f", Outcome: history.Installed, End: 4}}, "not set"},
		"campaign of nobody":  {record(campaignOp("campaign", &history.Campaign{ID: "spring"})), "nobody is to get a mail"},
		"campaign, no id":     {record(campaignOp("stop", &history.Campaign{})), "without an id"},
		"a key is missing":    {record(campaignOp("campaign", &history.Campaign{ID: "spring", Recipients: []string{"a", "b"}, Keys: []string{"k"}})), "2 recipients and 1 keys"},
		"depth of no queue":   {history.Record{T: 1, Kind: history.KindDepth, Depth: &history.Depth{Ready: 1}}, "holds 1 messages"},
		"negative depth":      {history.Record{T: 1, Kind: history.KindDepth, Depth: &history.Depth{Queue: "q", Ready: -1}}, "holds -1 messages"},
		"difference, no row":  {history.Record{T: 1, Kind: history.KindChange, Change: &history.Change{Database: "d", Table: "t", Op: "UPDATE", Order: 1, CommitAt: time.Unix(1, 0), Delta: true}}, "is none"},
		"inserted difference": {history.Record{T: 1, Kind: history.KindChange, Change: &history.Change{Database: "d", Table: "t", Op: "INSERT", Row: "a", Order: 1, CommitAt: time.Unix(1, 0), Delta: true}}, "is none"},
		"change, no order":    {history.Record{T: 1, Kind: history.KindChange, Change: &history.Change{Database: "d", Table: "t", Op: "INSERT"}}, "order 0"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, path := create(t)
			require.NoError(t, r.Meta(meta))
			require.NoError(t, r.Op(op("c1", "k", 10, 100)))
			err := r.Record(c.rec)
			require.ErrorIs(t, err, history.ErrMalformed)
			require.ErrorContains(t, err, c.want)
			require.ErrorIs(t, r.Close(), history.ErrMalformed, "a refusal must not be overlooked")

			h, err := history.Load(path)
			require.NoError(t, err)
			require.Len(t, h.Refused, 1)
			require.Contains(t, h.Refused[0].Reason, c.want)
			require.Len(t, h.Ops, 1)
		})
	}
}

func TestFirstRecordIsTheMeta(t *testing.T) {
	t.Parallel()
	r, _ := create(t)
	require.ErrorContains(t, r.Note("too early"), "first record must be the meta")
}

func TestMetaNamesWhatItCannotJudge(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*history.Meta){
		"without a scenario": func(m *history.Meta) { m.Scenario = "" },
		`policy "exactly"`:   func(m *history.Meta) { m.Policy = "exactly" },
		`server "kind"`:      func(m *history.Meta) { m.Server = "kind" },
	} {
		r, _ := create(t)
		m := meta
		change(&m)
		require.ErrorContains(t, r.Meta(m), want)
	}
}

func TestEvidenceIsNeverOverwritten(t *testing.T) {
	t.Parallel()
	_, path := create(t)
	_, err := history.Create(path)
	require.ErrorIs(t, err, os.ErrExist)
}

func TestRecordsFromManyGoroutines(t *testing.T) {
	t.Parallel()
	r, path := create(t)
	require.NoError(t, r.Meta(meta))
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := range int64(200) {
				if err := r.Op(op(fmt.Sprint(g), fmt.Sprintf("b%d-%d", g, i), 10*i+1, 10*i+5)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, r.Close())
	h, err := history.Load(path)
	require.NoError(t, err)
	require.Empty(t, h.Problems)
	require.Len(t, h.Ops, 3200)
}

func TestReadNamesBadLines(t *testing.T) {
	t.Parallel()
	var file bytes.Buffer
	enc := json.NewEncoder(&file)
	require.NoError(t, enc.Encode(history.Record{T: 1, Kind: history.KindMeta, Meta: withWall(meta)}))
	file.WriteString("\n{not json}\n")
	file.WriteString(`{"t":5,"kind":"weather","weather":{"sun":true}}` + "\n")
	require.NoError(t, enc.Encode(record(op("", "k", 20, 10))))
	require.NoError(t, enc.Encode(record(op("", "k", 10, 20))))
	file.WriteString(`{"t":30,"kind":"op","op":{"na`) // cut short by a kill

	h, err := history.Read(&file)
	require.NoError(t, err)
	require.Len(t, h.Ops, 1)
	require.Len(t, h.Problems, 3)
	require.Equal(t, []int{3, 5, 7}, []int{h.Problems[0].Line, h.Problems[1].Line, h.Problems[2].Line})
	require.True(t, strings.HasPrefix(h.Problems[2].Error(), "line 7: "))
	require.Nil(t, h.Final)
}

func TestNowIsMonotonicAndShared(t *testing.T) {
	t.Parallel()
	last := history.Now()
	require.Positive(t, last)
	for range 1000 {
		now := history.Now()
		require.GreaterOrEqual(t, now, last)
		last = now
	}
}

func record(o history.Op) history.Record {
	return history.Record{T: max(o.Return, 1), Kind: history.KindOp, Op: &o}
}

func withWall(m history.Meta) *history.Meta {
	m.Wall = time.Unix(1_700_000_000, 0)
	return &m
}
