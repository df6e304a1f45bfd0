package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// cancels is a crowd of customers who cancel and reopen, at every moment of a
// mail's life, beside customers who only book. What each sees is judged twice:
// by the rows and the ledger, and by what the booking service tells (C-12).
func cancels() Scenario {
	s := Scenario{
		Name:   "lab-cancel",
		Title:  "customers cancel and reopen at every moment of their mail's life",
		Proves: []string{"C-01", "C-06", "C-07", "C-08", "C-09", "C-10", "C-12", "A2-14", "LAB-C1", "LAB-C2", "LAB-FLAG", "LAB-TOMB", "TRAP-C2-1", "TRAP-C2-2", "TRAP-C2-3", "TRAP-C2-4", "TRAP-C2-6", "TRAP-C2-7"},
		Cells:  []Cell{cellResend()},
		Floors: history.Floors{Confirmed: 500, Faults: 1},
		Invariants: append(everyMail(),
			"cancel-is-honoured"),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 490, PerSecond: 24},
		FaultNames: []string{faultCancels},
		Quiesce:    90 * time.Second,
		Expect:     60 * time.Second,
		Judge:      judgeCancels,
	}
	// A held mail must outlive the way of its cancel on a busy machine.
	s.System.SendDeadline, s.System.Lease = 6*time.Second, 9*time.Second
	s.Faults = func(b *Bench) []faults.Fault { return []faults.Fault{newCancelling(b)} }
	return s
}

const faultCancels = "cancels"

// The stories. Each is the beginning of its customers' addresses, so that the
// judge knows them by the rows.
const (
	storyEarly   = "early"        // cancelled as soon as it was confirmed
	storyHeld    = "heldsent"     // cancelled while the server holds the dot, then accepted
	storyRefused = "heldrefused"  // cancelled while it is sent, then refused for now (LAB-FLAG)
	storyLate    = "late"         // cancelled after the customer has it
	storyReopen  = "reopened"     // cancelled and reopened
	storyOld     = "oldcancelled" // and then the old cancel arrives once more
	storyFirst   = "overtaken"    // the cancel overtakes its confirmation on the topic (LAB-TOMB)
)

// order of the stories, for the draw.
var order = []string{storyEarly, storyHeld, storyRefused, storyLate, storyReopen, storyOld, storyFirst}

// stories are how many there are of each.
func stories() map[string]int {
	return map[string]int{storyEarly: 60, storyHeld: 16, storyRefused: 16, storyLate: 40, storyReopen: 30, storyOld: 20, storyFirst: 16}
}

const (
	// atOnce bounds the sessions that are held side by side: others need workers.
	atOnce = 3
	// cancelWay is how long a held mail is held after its cancel was
	// acknowledged: outbox, Kafka, bridge. Where that is too short the mail ends
	// the same; the judge wants that most cancels met their mail while it was sent.
	cancelWay = 1500 * time.Millisecond
	// storyBound ends one customer's wait.
	storyBound = 30 * time.Second
	// toldBound is how long the booking service may take to hear of the last mails.
	toldBound = 30 * time.Second
)

// canceller is a target whose customers cancel; the pipeline is one.
type canceller interface {
	Reopen(ctx context.Context, booking string, generation int) history.OpOutcome
	RepeatCancel(ctx context.Context, booking string, generation int) error
	CancelOvertakes(ctx context.Context, booking, recipient string) error
	MailTold(ctx context.Context, booking string) (string, error)
}

// cancelling is the crowd, as a campaign.
type cancelling struct {
	bench  *Bench
	target canceller // nil: the target cannot
	cast   []customer
	done   chan struct{}
	held   chan struct{} // slots
	stop   context.CancelFunc

	mu     sync.Mutex
	ended  int
	errs   []error
	stored map[string]bool // recipients that have a copy
}

// customer is one of the crowd.
type customer struct {
	story string
	Booking
}

func newCancelling(b *Bench) *cancelling {
	c := &cancelling{bench: b, done: make(chan struct{}), held: make(chan struct{}, atOnce), stored: map[string]bool{}}
	c.target, _ = b.Target.(canceller)
	r := b.Rand("cancels")
	for _, story := range order {
		for i := range stories()[story] {
			c.cast = append(c.cast, customer{story, Booking{ID: drawUUID(r), Recipient: fmt.Sprintf("%s%03d@customers.test", story, i+1)}})
		}
	}
	r.Shuffle(len(c.cast), func(i, j int) { c.cast[i], c.cast[j] = c.cast[j], c.cast[i] })
	var at time.Duration
	for i := range c.cast {
		at += time.Duration(r.ExpFloat64() / 10 * float64(time.Second))
		c.cast[i].At = at
	}
	return c
}

func (*cancelling) Name() string { return faultCancels }

func (c *cancelling) Available() error {
	if c.target == nil {
		return errors.New("the target cannot be cancelled and reopened")
	}
	return nil
}

func (c *cancelling) Done() <-chan struct{} { return c.done }

func (c *cancelling) Progress() (struck, of int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended, len(c.cast)
}

// Inject arms the mail server and sends the crowd.
func (c *cancelling) Inject(ctx context.Context) error {
	hold := func(story string, stage script.Stage) script.Rule {
		return script.Rule{
			Match:  script.Match{Recipient: story + "*"},
			Action: script.Action{Kind: script.HoldUntilReleased, Stage: stage, For: script.Duration(5 * time.Second)},
		}
	}
	for _, rule := range []script.Rule{
		hold(storyHeld, smtp.StageDot), hold(storyRefused, smtp.StageData),
		smtp.On(smtp.StageDot, smtp.Reply).Code(451).To(storyRefused + "*").Rule(),
	} {
		if _, err := c.bench.Parts.Mail.AddRule(rule); err != nil {
			return err
		}
	}
	ctx, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	copies := c.bench.Parts.Mail.Subscribe(ctx)
	go func() {
		for a := range copies {
			if a.Stored {
				c.mu.Lock()
				c.stored[a.Recipient] = true
				c.mu.Unlock()
			}
		}
	}()
	go c.play(ctx)
	return nil
}

func (c *cancelling) play(ctx context.Context) {
	defer close(c.done)
	began := history.Now()
	var all sync.WaitGroup
	for _, who := range c.cast {
		intended := began + int64(who.At)
		if !pause(ctx, time.Duration(intended-history.Now())) {
			break
		}
		all.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, 2*storyBound)
			defer cancel()
			err := c.story(bounded, who, intended)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.ended++
			if err != nil {
				c.errs = append(c.errs, fmt.Errorf("%s: %w", who.Recipient, err))
			}
		})
	}
	all.Wait()
}

// story is one customer's.
func (c *cancelling) story(ctx context.Context, who customer, intended int64) error {
	switch who.story {
	case storyHeld, storyRefused:
		return c.heldStory(ctx, who, intended)
	case storyLate:
		if err := c.confirm(ctx, who, intended); err != nil {
			return err
		}
		if err := c.awaitCopy(ctx, who); err != nil {
			return err
		}
		return c.cancel(ctx, who)
	case storyFirst:
		return c.overtaken(ctx, who, intended)
	}
	if err := c.confirm(ctx, who, intended); err != nil {
		return err
	}
	if err := c.cancel(ctx, who); err != nil || who.story == storyEarly {
		return err
	}
	if err := c.reopen(ctx, who); err != nil || who.story == storyReopen {
		return err
	}
	return c.target.RepeatCancel(ctx, who.ID, 1)
}

// overtaken: the mail service hears of the cancel first. By the time that the
// customer's own cancel gets there, a mail without a tombstone is sent.
func (c *cancelling) overtaken(ctx context.Context, who customer, intended int64) error {
	if err := c.target.CancelOvertakes(ctx, who.ID, who.Recipient); err != nil {
		return err
	}
	if err := c.confirm(ctx, who, intended); err != nil {
		return err
	}
	pause(ctx, cancelWay)
	return c.cancel(ctx, who)
}

func (c *cancelling) heldStory(ctx context.Context, who customer, intended int64) error {
	select {
	case c.held <- struct{}{}:
		defer func() { <-c.held }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := c.confirm(ctx, who, intended); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, storyBound)
	defer cancel()
	hold, err := c.bench.Parts.Mail.AwaitHold(wait, func(h script.Hold) bool { return h.Recipient == who.Recipient })
	if err != nil {
		return fmt.Errorf("its mail was not held: %w", err)
	}
	defer c.bench.Parts.Mail.Release(hold.ID)
	if err := c.cancel(ctx, who); err != nil {
		return err
	}
	// The server holds the mail: nobody can know yet what became of it (C-12).
	if _, err := c.ask(ctx, who); err != nil {
		return err
	}
	pause(ctx, cancelWay)
	return nil
}

// ask asks the booking service what it knows of the customer's mail, and records
// the answer: it is judged with the rest of the evidence.
func (c *cancelling) ask(ctx context.Context, who customer) (string, error) {
	call := history.Now()
	answer, err := c.target.MailTold(ctx, who.ID)
	if err != nil {
		return "", err
	}
	returned := history.Now()
	c.bench.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
		Name: "ask", Booking: who.ID, Key: c.bench.Target.Key(who.ID, generationOf(who.story)), Recipient: who.Recipient,
		Intended: call, Call: call, Return: returned, Outcome: history.OpOK, Answer: answer,
	}})
	return answer, nil
}

func (c *cancelling) awaitCopy(ctx context.Context, who customer) error {
	for deadline := time.Now().Add(storyBound); time.Now().Before(deadline); {
		c.mu.Lock()
		has := c.stored[who.Recipient]
		c.mu.Unlock()
		if has {
			return nil
		}
		if !pause(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("no copy within %s", storyBound)
}

func (c *cancelling) confirm(ctx context.Context, who customer, intended int64) error {
	return c.op(ctx, who, "confirm", 1, intended, func(ctx context.Context) history.OpOutcome {
		return c.bench.Target.Confirm(ctx, who.ID, who.Recipient)
	})
}

func (c *cancelling) cancel(ctx context.Context, who customer) error {
	return c.op(ctx, who, "cancel", 1, history.Now(), func(ctx context.Context) history.OpOutcome {
		return c.bench.Target.Cancel(ctx, who.ID)
	})
}

func (c *cancelling) reopen(ctx context.Context, who customer) error {
	return c.op(ctx, who, "reopen", 2, history.Now(), func(ctx context.Context) history.OpOutcome {
		return c.target.Reopen(ctx, who.ID, 1)
	})
}

func (c *cancelling) op(ctx context.Context, who customer, name string, generation int, intended int64, do func(context.Context) history.OpOutcome) error {
	return operate(ctx, c.bench, who.Booking, name, generation, intended, do)
}

// operate makes an operation until it is acknowledged, and records each try.
func operate(ctx context.Context, b *Bench, who Booking, name string, generation int, intended int64, do func(context.Context) history.OpOutcome) error {
	for range maxTries {
		call := history.Now()
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		outcome := do(try)
		cancel()
		returned := history.Now()
		b.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
			Name: name, Booking: who.ID, Key: b.Target.Key(who.ID, generation), Recipient: who.Recipient,
			Intended: intended, Call: call, Return: returned, Outcome: outcome,
		}})
		if outcome == history.OpOK {
			return nil
		}
		if !pause(ctx, tryAgain) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("%s was not acknowledged in %d tries", name, maxTries)
}

// Heal ends the crowd.
func (c *cancelling) Heal(ctx context.Context) error {
	if c.stop == nil {
		return nil
	}
	c.stop()
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Witness asks the booking service what it tells each of the customers, once
// everything has come to rest. Whether that is true is the judge's to say.
func (c *cancelling) Witness(ctx context.Context) (faults.Witness, error) {
	c.mu.Lock()
	errs := slices.Clone(c.errs)
	c.mu.Unlock()
	told := map[string]int{}
	var keys []string
	deadline := time.Now().Add(toldBound)
	for _, who := range c.cast {
		status, err := c.awaitTold(ctx, who, deadline)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", who.Recipient, err))
		}
		told[status]++
		keys = append(keys, c.bench.Target.Key(who.ID, 1))
	}
	if len(errs) > 0 {
		return faults.Witness{}, fmt.Errorf("%d of %d customers: %w", len(errs), len(c.cast), errors.Join(errs[:min(len(errs), 5)]...))
	}
	return faults.Witness{
		Text:  fmt.Sprintf("%d customers cancelled; of their mails they were told: %v", len(c.cast), told),
		Count: len(c.cast), Keys: keys,
	}, nil
}

func generationOf(story string) int {
	if story == storyReopen || story == storyOld {
		return 2
	}
	return 1
}

// awaitTold waits for what is known to arrive, and records the last answer.
func (c *cancelling) awaitTold(ctx context.Context, who customer, deadline time.Time) (string, error) {
	for {
		status, err := c.target.MailTold(ctx, who.ID)
		if err != nil {
			return status, err
		}
		if status != "pending" || time.Now().After(deadline) {
			return c.ask(ctx, who)
		}
		if !pause(ctx, 100*time.Millisecond) {
			return status, ctx.Err()
		}
	}
}

// isTrue reads a boolean as Postgres prints it.
func isTrue(text string) bool { return text == "true" || text == "t" }

// truthful compares what a customer was told with what lies in the mailbox.
func truthful(story, told string, copies int) error {
	want := map[string][]string{
		storyEarly: {"cancelled", "too-late"}, storyHeld: {"too-late"}, storyRefused: {"cancelled"},
		storyLate: {"too-late"}, storyReopen: {"sent"}, storyOld: {"sent"}, storyFirst: {"cancelled"},
	}[story]
	switch has := copies > 0; {
	case !slices.Contains(want, told):
		return fmt.Errorf("was told %q, should be %s", told, strings.Join(want, " or "))
	case has != (told != "cancelled"):
		return fmt.Errorf("was told %q, and has %d copies", told, copies)
	}
	return nil
}

// judgeCancels wants the end of each story in the rows.
func judgeCancels(h *history.History, own *ownFindings) {
	const name = "cancel-ends-as-it-must"
	columns := verify.DefaultColumns().Mails
	own.check(name, "A cancel that comes in time leaves a CANCELLED mail and no copy, one that comes too late leaves it SENT; a reopened booking's mail goes out, whatever old cancels arrive.", 0)
	met := 0 // cancels that found their mail while it was sent
	for _, ch := range h.Changes {
		if ch.Table == columns.Table && ch.New[columns.Status] == "SENDING" && isTrue(ch.New[columns.CancelAsked]) && !isTrue(ch.Old[columns.CancelAsked]) {
			met++
		}
	}
	want := map[string]string{storyHeld: "sent", storyRefused: "cancelled", storyLate: "sent", storyFirst: "cancelled"}
	looked, inTime := 0, 0
	for _, row := range h.Final.Rows {
		story := storyOf(row.Recipient)
		if _, ours := stories()[story]; !ours {
			continue
		}
		looked++
		second := strings.HasSuffix(row.Key, ":v2")
		state := want[story]
		if second {
			state = "sent"
		}
		switch {
		case state != "" && row.State != state:
			own.find(verify.Fail, name, row.Key, fmt.Sprintf("a mail of the story %q ends %s; it is %s", story, state, row.State))
		case state == "" && row.State != "sent" && row.State != "cancelled":
			own.find(verify.Fail, name, row.Key, fmt.Sprintf("a mail that was cancelled early is sent or cancelled; it is %s", row.State))
		case story == storyEarly && row.State == "cancelled":
			inTime++
		}
	}
	own.checked[len(own.checked)-1].Looked = looked
	own.measure("cancels that met their mail while it was sent", float64(met), "", "")
	own.measure("early cancels that came in time", float64(inTime), "", fmt.Sprintf("of %d", stories()[storyEarly]))
	if met == 0 {
		own.find(verify.Invalid, name, "", "no cancel met its mail while it was sent")
	}
	judgeAnswers(h, own)
}

// storyOf a customer's address.
func storyOf(recipient string) string {
	return strings.TrimRight(strings.TrimSuffix(recipient, "@customers.test"), "0123456789")
}

// judgeAnswers holds every answer against what really became of the mail. An
// answer that is final must never be another later, so the first ones, given
// while a mail was held, are judged like the last.
func judgeAnswers(h *history.History, own *ownFindings) {
	const name = "told-is-true"
	own.check(name, "A customer is told that a mail is cancelled, sent or too late only when it is so, and in the end is told (C-12).", 0)
	copies := map[string]int{}
	for _, a := range h.Attempts {
		if a.Stored {
			copies[a.Key]++
		}
	}
	last := map[string]*history.Op{}
	looked := 0
	for i := range h.Ops {
		o := &h.Ops[i]
		if o.Name != "ask" {
			continue
		}
		looked++
		if o.Answer != "pending" && (o.Answer == "cancelled") == (copies[o.Key] > 0) {
			own.find(verify.Fail, name, o.Key, fmt.Sprintf("the customer of the story %q was told %q, and the mail server has %d copies", storyOf(o.Recipient), o.Answer, copies[o.Key]))
		}
		if l := last[o.Key]; l == nil || l.Return < o.Return {
			last[o.Key] = o
		}
	}
	for key, o := range last {
		if err := truthful(storyOf(o.Recipient), o.Answer, copies[key]); err != nil {
			own.find(verify.Fail, name, key, fmt.Sprintf("the customer of the story %q %v", storyOf(o.Recipient), err))
		}
	}
	own.checked[len(own.checked)-1].Looked = looked
}
