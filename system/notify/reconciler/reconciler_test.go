package reconciler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	fake "mailproof/fakes/smtp"
	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/mail/mailtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	noon   = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	bounds = Bounds{Lease: 45 * time.Second, Session: 5 * time.Minute, Processing: time.Minute}
)

// unknown is a row that was claimed tries times from noon on and became UNKNOWN
// at noon.
func unknown(tries int64) delivery.Row {
	return delivery.Row{
		ID: uuid.New(), DedupeKey: "ticket:1", Type: contract.TicketConfirmation, Status: delivery.Unknown,
		Token: tries, Attempts: int(tries), FirstClaimedAt: &noon, ChangedAt: noon,
	}
}

func line(e Event, id string) Line {
	return Line{ID: id, Key: "ticket:1", Event: e, ProviderID: "p-" + id}
}

func TestWhatALogProves(t *testing.T) {
	t.Parallel()
	late := noon.Add(bounds.Lease + bounds.Session + bounds.Processing + time.Second)
	whole := func(lines ...Line) Page { return Page{Lines: lines, Reach: time.Hour, OnePerTry: true} }
	other := Line{ID: "1", Key: "ticket:12", Event: Stored}
	for name, c := range map[string]struct {
		tries int64
		page  Page
		now   time.Time
		want  Result
	}{
		"a copy":                                {1, whole(line(Stored, "1")), noon, Found},
		"a copy beside a refusal":               {2, whole(line(Deferred, "1"), line(Stored, "2")), noon, Found},
		"a copy in a log that does not reach":   {1, Page{Lines: []Line{line(Stored, "1")}}, noon, Found},
		"known already":                         {1, whole(line(Duplicate, "1")), noon, Found},
		"another key's copy":                    {1, whole(other), noon, Open},
		"closed, the only try":                  {1, whole(line(Closed, "1")), noon, Absent},
		"closed, one of two tries":              {2, whole(line(Closed, "1")), noon, Open},
		"closed, the same line twice":           {2, whole(line(Closed, "1"), line(Closed, "1")), noon, Open},
		"closed and refused, two tries":         {2, whole(line(Closed, "1"), line(Rejected, "2")), noon, Absent},
		"closed, where a try may leave two":     {1, Page{Lines: []Line{line(Closed, "1")}, Reach: time.Hour}, noon, Open},
		"one still runs":                        {1, whole(line(Closed, "1"), line(Running, "2")), late, Open},
		"a word nobody knows":                   {1, whole(line(Closed, "1"), line("queued", "2")), late, Open},
		"nothing, too early":                    {1, whole(), noon.Add(time.Minute), Open},
		"nothing, at the very end":              {1, whole(), late.Add(-time.Second), Open},
		"nothing, late enough":                  {1, whole(), late, Absent},
		"nothing, the log does not say how far": {1, Page{}, late, Open},
		"nothing, the log is younger":           {1, Page{Reach: late.Sub(noon)}, late, Open},
		"nothing, the log is a second older":    {1, Page{Reach: late.Sub(noon) + time.Second}, late, Absent},
	} {
		got := judge(unknown(c.tries), c.page, c.now, bounds)
		require.Equal(t, c.want, got.result, "%s: %s", name, got.why)
		require.Equal(t, c.want == Found, got.providerID != "" && got.result == Found, name)
	}
	row := unknown(1)
	row.FirstClaimedAt = nil
	require.Equal(t, Open, judge(row, whole(), late, bounds).result)
}

// A log that is behind, begins late, repeats itself, leaves lines out that are
// still to come, or mixes keys never lets a mail go that has a copy or may get
// one.
func TestNoLieAboutCompletenessDoubles(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seconds := func(name string, from, to int) time.Duration {
			return time.Duration(rapid.IntRange(from, to).Draw(t, name)) * time.Second
		}
		b := Bounds{Lease: seconds("lease", 1, 60), Session: seconds("session", 0, 300), Processing: seconds("processing", 0, 60)}
		tries := rapid.IntRange(1, 4).Draw(t, "tries")
		row := unknown(int64(tries))
		asked := noon.Add(seconds("asked", 0, 1000))
		claim, last := noon, noon
		var page Page
		page.OnePerTry = rapid.Bool().Draw(t, "one per try")
		copied := false
		reach := seconds("reach", 0, 2000)
		for i := range tries {
			if i > 0 {
				claim = claim.Add(seconds("next claim", 0, 100))
			}
			last = claim
			end := claim.Add(seconds("ends", 0, int((b.Lease+b.Session)/time.Second)))
			logged := end.Add(seconds("logged", 0, int(b.Processing/time.Second)))
			what := rapid.SampledFrom([]Event{"", Stored, Closed, Deferred, Rejected}).Draw(t, "outcome")
			copied = copied || what == Stored
			if what == "" || !page.OnePerTry && what != Stored && rapid.Bool().Draw(t, "not logged") {
				continue
			}
			l := line(what, fmt.Sprint(i))
			visible := !logged.After(asked) && end.After(asked.Add(-reach))
			if !visible && rapid.Bool().Draw(t, "seen running") && end.After(asked) {
				page.Lines = append(page.Lines, line(Running, l.ID))
			}
			if !visible {
				continue
			}
			for range rapid.IntRange(1, 2).Draw(t, "times") {
				page.Lines = append(page.Lines, l)
			}
			if !page.OnePerTry && rapid.Bool().Draw(t, "half a request before") {
				page.Lines = append(page.Lines, line(Closed, l.ID+"a"))
			}
		}
		row.ChangedAt = last.Add(seconds("unknown", 0, int(b.Lease/time.Second)))
		if asked.Before(row.ChangedAt) {
			asked = row.ChangedAt // only then there is a row to ask about
		}
		// The log says less or as much as is true, whole seconds, or nothing.
		page.Reach = min(reach, seconds("said", 0, 2000))
		if rapid.Bool().Draw(t, "other keys") {
			page.Lines = append(page.Lines, Line{ID: "x", Key: "ticket:2", Event: Stored}, Line{ID: "y", Key: "ticket:11", Event: Closed})
		}
		v := judge(row, page, asked, b)
		if v.result == Absent && copied {
			t.Fatalf("let go although there is a copy: %s", v.why)
		}
		if v.result == Found && !copied {
			t.Fatalf("found without a copy: %s", v.why)
		}
	})
}

// rows is a store of one row, and a log of one page.
type rows struct {
	row   delivery.Row
	now   time.Time
	page  Page
	err   error
	calls []string
	moved bool // somebody else was faster
	rung  int
	count Tally
}

func (r *rows) Now(context.Context) (time.Time, error)             { return r.now, nil }
func (r *rows) Lookup(context.Context, delivery.Row) (Page, error) { return r.page, r.err }
func (r *rows) Reconciled(res string)                              { r.count[Result(res)]++ }
func (r *rows) Ring(_ context.Context, msgs ...amqp.Message) error {
	r.rung += len(msgs)
	return errors.New("RabbitMQ is away: the sweeper rings")
}

func (r *rows) UnknownRows(_ context.Context, after delivery.After, _ int) ([]delivery.Row, error) {
	if after.ID == r.row.ID || r.row.Status != delivery.Unknown {
		return nil, nil
	}
	return []delivery.Row{r.row}, nil
}

func (r *rows) move(call string, to delivery.Status) (delivery.Outcome, error) {
	r.calls = append(r.calls, call)
	if !r.moved {
		r.row.Status = to
	}
	return delivery.Outcome{Applied: !r.moved, Row: r.row}, nil
}

func (r *rows) Found(_ context.Context, _ uuid.UUID, id string) (delivery.Outcome, error) {
	return r.move("found "+id, delivery.Sent)
}

func (r *rows) ProvenAbsent(_ context.Context, _ uuid.UUID, token int64) (delivery.Outcome, error) {
	return r.move(fmt.Sprint("absent ", token), delivery.Pending)
}

func (r *rows) AskAgain(_ context.Context, _ uuid.UUID, token int64, d time.Duration) (delivery.Outcome, error) {
	return r.move(fmt.Sprint("ask ", token, " ", d), delivery.Pending)
}

func (r *rows) reconciler() *Reconciler {
	r.count = Tally{}
	return New(Config{
		Store: r, Ring: r, Count: r, Provider: r, Bounds: bounds, Log: slog.New(slog.DiscardHandler),
		Batch: 1, Timeout: time.Minute, KeyLifetime: time.Hour, Grace: time.Minute,
	})
}

func TestRoundActsOnWhatIsProven(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		page  Page
		err   error
		moved bool
		calls []string
		want  Result
		rung  int
	}{
		"found":          {page: Page{Lines: []Line{line(Stored, "1")}}, calls: []string{"found p-1"}, want: Found},
		"absent":         {page: Page{Lines: []Line{line(Closed, "1"), line(Closed, "2")}, OnePerTry: true}, calls: []string{"absent 2"}, want: Absent, rung: 1},
		"open":           {want: Open},
		"moved on":       {page: Page{Lines: []Line{line(Stored, "1")}}, moved: true, calls: []string{"found p-1"}, want: Moved},
		"log is away":    {err: errors.New("refused"), want: Failing},
		"half an answer": {page: Page{Lines: []Line{line(Closed, "1"), line(Closed, "2")}, OnePerTry: true}, err: errors.New("unexpected EOF"), want: Failing},
	} {
		r := &rows{row: unknown(2), now: noon, page: c.page, err: c.err, moved: c.moved}
		tally, err := r.reconciler().Round(t.Context(), nil)
		require.Equal(t, c.err != nil, err != nil, name)
		require.Equal(t, Tally{c.want: 1}, tally, name)
		require.Equal(t, tally, r.count, name)
		require.Equal(t, c.calls, r.calls, name)
		require.Equal(t, c.rung, r.rung, name)
	}
}

// A receiver that deduplicates is asked by a try, later and later, and never for
// a mail whose cancel was asked for.
func TestSameKeyIsAskedByATry(t *testing.T) {
	t.Parallel()
	ask := func(now time.Time, change func(*delivery.Row)) Result {
		r := &rows{row: unknown(3), now: now}
		change(&r.row)
		rec := r.reconciler()
		rec.cfg.Provider = nil
		rec.cfg.SameKey = func(m contract.MailType) bool { return m == contract.TicketConfirmation }
		res, err := rec.One(t.Context(), r.row)
		require.NoError(t, err)
		return res
	}
	same := func(*delivery.Row) {}
	require.Equal(t, Open, ask(noon.Add(3*time.Minute), same), "the third attempt waits four graces")
	require.Equal(t, Asked, ask(noon.Add(4*time.Minute), same))
	require.Equal(t, Open, ask(noon.Add(time.Hour), func(r *delivery.Row) { r.CancelAsked = true }))
	require.Equal(t, Open, ask(noon.Add(time.Hour), func(r *delivery.Row) { r.Type = contract.Marketing }))
}

func TestRoundTakesOnlyWhatIsChosen(t *testing.T) {
	t.Parallel()
	r := &rows{row: unknown(1), now: noon, page: Page{Lines: []Line{line(Stored, "1")}}}
	tally, err := r.reconciler().Round(t.Context(), func(delivery.Row) bool { return false })
	require.NoError(t, err)
	require.Empty(t, tally)
	require.Empty(t, r.calls)
}

func TestHTTPLogRefusesHalfTruths(t *testing.T) {
	t.Parallel()
	good := `{"event":"closed","key":"k","session":1,"at":7}` + "\n"
	for name, answer := range map[string]http.HandlerFunc{
		"500":           func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
		"a redirect":    func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/else", http.StatusFound) },
		"a page":        func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") },
		"an error line": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, good+`{"error":"disk"}`) },
		"no key":        func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"event":"closed"}`) },
		"half a line":   func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, good+good[:20]) },
		"too much":      func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(bytes.Repeat([]byte(good), 40_000)) },
		"cut off": func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, good)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"ends by closing": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Transfer-Encoding", "identity")
			fmt.Fprint(w, good)
		},
	} {
		srv := httptest.NewServer(answer)
		l, err := NewHTTPLog(srv.URL, true)
		require.NoError(t, err)
		_, err = l.Lookup(t.Context(), delivery.Row{DedupeKey: "k"})
		require.Error(t, err, name)
		l.Close()
		srv.Close()
	}
	for _, addr := range []string{"", "ftp://x", "localhost:80"} {
		_, err := NewHTTPLog(addr, true)
		require.Error(t, err)
	}
}

// The fake's own log, for what really happened to a mail.
func TestFakesLogProvesWhatHappened(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rule fake.Builder
		want Result
	}{
		"kept, the answer lost": {fake.On(fake.StageStored, fake.Drop), Found},
		"closed at the dot":     {fake.On(fake.StageDot, fake.Drop), Absent},
		"held at the dot":       {fake.On(fake.StageDot, fake.HoldUntilReleased), Open},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv, err := fake.Start(fake.Options{HTTPAddr: "127.0.0.1:0", Rules: []fake.Rule{c.rule.Rule()}})
			require.NoError(t, err)
			defer func() { require.NoError(t, srv.Close()) }()
			s, err := mail.NewSMTPSender(mail.SMTPConfig{Addr: srv.Addr(), Name: "x", SendTimeout: 2 * time.Second})
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			_, err = s.Send(t.Context(), mailtest.Mail("ticket:1"), nil)
			var lost *mail.AmbiguousError
			require.ErrorAs(t, err, &lost)
			l, err := NewHTTPLog(srv.URL()+"/log", true)
			require.NoError(t, err)
			defer l.Close()
			require.Eventually(t, func() bool {
				page, err := l.Lookup(t.Context(), delivery.Row{DedupeKey: "ticket:1"})
				require.NoError(t, err)
				v := judge(unknown(1), page, noon, bounds)
				return len(page.Lines) > 0 && v.result == c.want
			}, 10*time.Second, 10*time.Millisecond)
			srv.ReleaseAll()
		})
	}
}
