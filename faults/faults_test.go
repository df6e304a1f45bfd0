package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	netsmtp "net/smtp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/fakes/resendapi"
	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/history"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func server(t *testing.T, mode smtp.Mode) *smtp.Server {
	t.Helper()
	s, err := smtp.Start(smtp.Options{Mode: mode, Seed: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// send hands one mail over and returns what the client saw.
func send(s *smtp.Server, to, key string) error {
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
		return err
	}
	c, err := netsmtp.NewClient(conn, "test")
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return c.Hello("victim.w1") },
		func() error { return c.Mail("shop@x.test") },
		func() error { return c.Rcpt(to) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	w, err := c.Data()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "Message-ID: <%s@x>\r\nX-Dedupe-Key: %s\r\n\r\nyour ticket\r\n", key, key); err != nil {
		return err
	}
	return w.Close()
}

func clock() int64 { return history.Now() }

func TestLose250KeepsTheMailAndWritesNoReply(t *testing.T) {
	s := server(t, smtp.Plain)
	for _, how := range []script.Kind{script.Drop, script.Reset, script.Hang} {
		f := NewLose250(s, "smtp server", []Loss{{Recipient: string(how) + "@x.test", How: []script.Kind{how, script.Drop}}})
		run := NewRun(f, clock)
		require.NoError(t, run.Inject(t.Context()))
		require.Error(t, send(s, string(how)+"@x.test", string(how)), "first answer lost")
		require.Error(t, send(s, string(how)+"@x.test", string(how)), "second answer lost")
		require.NoError(t, send(s, string(how)+"@x.test", string(how)), "the third arrives")
		require.NoError(t, send(s, "other@x.test", "other"), "other mails are not struck")
		require.NoError(t, run.Heal(t.Context()))
		require.Eventually(t, func() bool {
			w, err := f.Witness(t.Context())
			return err == nil && w.Count == 2
		}, 5*time.Second, 10*time.Millisecond)
		require.NoError(t, run.Witness(t.Context()))
		record := run.Record()
		require.Equal(t, history.Installed, record.Outcome)
		require.Equal(t, []string{string(how)}, record.Keys)
	}
}

// post hands one mail to the API, over a connection of its own.
func post(t *testing.T, api *resendapi.Server, key string) error {
	t.Helper()
	body := fmt.Sprintf(`{"from":"a@shop.test","to":"%s@x.test","subject":"s","text":"t"}`, key)
	req, err := http.NewRequestWithContext(t.Context(), "POST", api.URL+"/emails", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer re_1")
	req.Header.Set("User-Agent", "test")
	req.Header.Set("Idempotency-Key", key)
	client := http.Client{Timeout: 300 * time.Millisecond, Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("answered %d", res.StatusCode)
	}
	return nil
}

// A throttled API takes so many requests of a window; its witness is what it
// refused, and what was refused can come again.
func TestThrottleRefusesWhatIsTooMuch(t *testing.T) {
	api := resendapi.NewServer(t)
	f := &Throttle{Server: api, Limit: 2, Window: time.Hour}
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, post(t, api, "a"))
	require.NoError(t, post(t, api, "b"))
	w, err := f.Witness(t.Context())
	require.NoError(t, err)
	require.Empty(t, w.Text, "nothing was refused yet")
	require.ErrorContains(t, post(t, api, "c"), "429")
	require.ErrorContains(t, post(t, api, "d"), "429")
	require.ErrorContains(t, post(t, api, "d"), "429")
	require.Eventually(t, func() bool {
		w, err := f.Witness(t.Context())
		return err == nil && w.Count == 3
	}, 5*time.Second, 10*time.Millisecond)
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, post(t, api, "d"))
	require.NoError(t, run.Witness(t.Context()))
	require.Equal(t, "429 for 3 tries of 2 mails: more than 2 within 1h0m0s", run.Record().Witness)
	require.Equal(t, "mail API", run.Record().Target)
}

// TestLose250OverHTTP: the API keeps the mail and a repetition under its key is
// answered; each of the ways is one to lose the first answer.
func TestLose250OverHTTP(t *testing.T) {
	api := resendapi.NewServer(t)
	post := func(key string) error { return post(t, api, key) }
	for _, how := range OverHTTP() {
		f := NewLose250(api, "mail API", []Loss{{Recipient: string(how) + "@x.test", How: []script.Kind{how}}})
		run := NewRun(f, clock)
		require.NoError(t, run.Inject(t.Context()))
		require.Error(t, post(string(how)), "first answer lost")
		require.NoError(t, post(string(how)), "the second arrives")
		require.NoError(t, run.Heal(t.Context()))
		require.Eventually(t, func() bool {
			w, err := f.Witness(t.Context())
			return err == nil && w.Count == 1
		}, 5*time.Second, 10*time.Millisecond)
		require.Equal(t, 1, api.Verdict(string(how)).Copies)
	}
}

func TestLose250WitnessesNothingThatItDidNotDo(t *testing.T) {
	s := server(t, smtp.Plain)
	f := NewLose250(s, "smtp server", []Loss{{Recipient: "a@x.test", How: []script.Kind{script.Drop}}})
	run := NewRun(Unplug(f), clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, send(s, "a@x.test", "a"))
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, run.Witness(t.Context()))
	require.Equal(t, history.Installed, run.Record().Outcome)
	require.Empty(t, run.Record().Witness)
	require.Equal(t, "smtp server", run.Record().Target)
}

func TestDrawLossesMixesTheKinds(t *testing.T) {
	var who []string
	for i := range 500 {
		who = append(who, fmt.Sprintf("c%d@x.test", i))
	}
	losses := DrawLosses(rand.New(rand.NewPCG(1, 2)), who, 0.2, OverSMTP())
	require.Len(t, losses, 100)
	kinds := map[script.Kind]int{}
	twice := 0
	for _, l := range losses {
		kinds[l.How[0]]++
		if len(l.How) > 1 {
			twice++
		}
	}
	require.InDelta(t, 33, kinds[script.Drop], 1)
	require.InDelta(t, 33, kinds[script.Reset], 1)
	require.InDelta(t, 33, kinds[script.Hang], 1)
	require.InDelta(t, 33, twice, 20)
}

func TestRefuseRcptRefusesUntilItIsHealed(t *testing.T) {
	s := server(t, smtp.Plain)
	run := NewRun(&RefuseRcpt{Server: s}, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.ErrorContains(t, send(s, "a@x.test", "a"), "451")
	require.ErrorContains(t, send(s, "b@x.test", "b"), "451")
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, send(s, "a@x.test", "a"))
	require.NoError(t, run.Witness(t.Context()))
	require.Equal(t, 2, run.Record().Count)
}

// victim is a process that sends mails until it is killed.
type victim struct {
	server *smtp.Server
	pid    atomic.Int64
	kills  atomic.Int64
	cancel context.CancelFunc
	done   chan struct{}
}

func startVictim(t *testing.T, s *smtp.Server) *victim {
	v := &victim{server: s}
	require.NoError(t, v.Restart(t.Context()))
	t.Cleanup(func() { v.cancel(); <-v.done })
	return v
}

func (*victim) Name() string { return "victim" }
func (v *victim) PID() int   { return int(v.pid.Load()) }

func (v *victim) Kill(context.Context) error {
	v.kills.Add(1)
	v.cancel() // its sends end with their deadline; nobody waits for them
	return nil
}

func (v *victim) Restart(context.Context) error {
	ctx, cancel := context.WithCancel(context.Background())
	v.pid.Add(1)
	v.cancel, v.done = cancel, make(chan struct{})
	go func(done chan struct{}) {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			key := fmt.Sprintf("k%d-%d", v.pid.Load(), i)
			_ = send(v.server, key+"@x.test", key)
		}
	}(v.done)
	return nil
}

func TestKillWhileHeldKillsAtEachStage(t *testing.T) {
	s := server(t, smtp.Plain)
	v := startVictim(t, s)
	strikes := []Strike{{Stage: smtp.StageMail}}
	for _, stage := range []script.Stage{
		smtp.StageConnect, smtp.StageEHLO, smtp.StageRcpt, smtp.StageData,
		smtp.StageBody, smtp.StageDot, smtp.StageStored, smtp.StageReplied,
	} {
		strikes = append(strikes, Strike{Stage: stage})
	}
	strikes = append(strikes, Strike{Stage: smtp.StageDot, Discard: true})
	f := NewKillWhileHeld(s, v, strikes, func() time.Duration { return time.Millisecond }, new(sync.Mutex))
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, run.Wait(t.Context()))
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, run.Witness(t.Context()))
	record := run.Record()
	require.Equal(t, history.Installed, record.Outcome, record.Reason)
	require.Equal(t, len(strikes), record.Count)
	require.EqualValues(t, len(strikes), v.kills.Load())
	require.Contains(t, record.Witness, "dot, then discarded 1")
	require.Contains(t, record.Witness, "10 process ids")
	require.Empty(t, s.Holds(), "no session is left held")
	require.Empty(t, s.Rules())
}

func TestKillWhileHeldRefusesAnOrderThatCannotWork(t *testing.T) {
	f := NewKillWhileHeld(nil, &victim{}, []Strike{{Stage: smtp.StageEHLO}}, nil, new(sync.Mutex))
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.Equal(t, history.Skipped, run.Record().Outcome)
}

func TestKillWhileHeldThatIsCutShortIsNoWitness(t *testing.T) {
	s := server(t, smtp.Plain)
	v := startVictim(t, s)
	long := func() time.Duration { return time.Hour }
	f := NewKillWhileHeld(s, v, []Strike{{Stage: smtp.StageMail}, {Stage: smtp.StageMail}}, long, new(sync.Mutex))
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.Eventually(t, func() bool { n, _ := f.Progress(); return n == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, run.Witness(t.Context()))
	require.Empty(t, run.Record().Witness)
	require.Contains(t, run.Record().Reason, "1 of 2 kills")
}

func TestKillAtRandomKillsAfterEachGap(t *testing.T) {
	v := startVictim(t, server(t, smtp.Plain))
	f := NewKillAtRandom(v, []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}, new(sync.Mutex))
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, run.Wait(t.Context()))
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, run.Witness(t.Context()))
	require.Equal(t, 3, run.Record().Count)
	require.Contains(t, run.Record().Witness, "[1 2 3]")
}

// brokenVictim cannot be started again.
type brokenVictim struct{ victim }

func (*brokenVictim) Kill(context.Context) error    { return nil }
func (*brokenVictim) Restart(context.Context) error { return errors.New("no such file") }

func TestVictimThatDoesNotStartAgainIsIndeterminate(t *testing.T) {
	f := NewKillAtRandom(&brokenVictim{}, []time.Duration{1, 1}, new(sync.Mutex))
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, run.Wait(t.Context()))
	require.NoError(t, run.Heal(t.Context()))
	require.Equal(t, history.Indeterminate, run.Record().Outcome)
	require.Contains(t, run.Record().Reason, "no such file")
}

// panics in whichever method is named.
type panics struct{ in string }

func (panics) Name() string     { return "panics" }
func (panics) Available() error { return nil }
func (p panics) act(what string) error {
	if p.in == what {
		panic("planted")
	}
	return nil
}
func (p panics) Inject(context.Context) error { return p.act("inject") }
func (p panics) Heal(context.Context) error   { return p.act("heal") }
func (p panics) Witness(context.Context) (Witness, error) {
	return Witness{Text: "x", Count: 1}, p.act("witness")
}

func TestPanicIsReturnedAsSuch(t *testing.T) {
	for _, in := range []string{"inject", "heal", "witness"} {
		run := NewRun(panics{in}, clock)
		err := errors.Join(run.Inject(t.Context()), run.Heal(t.Context()), run.Witness(t.Context()))
		require.ErrorIs(t, err, ErrPanic, in)
		require.ErrorContains(t, err, "planted")
	}
}
