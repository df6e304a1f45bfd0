package scenarios

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/target"
	"mailproof/verify"
)

// What befalls a process at a crash point.
const (
	actKill  = "kill"
	actPause = "pause"
)

// crashes is the crash table, a scenario for each part of the path: one boundary
// after another, a few customers at each, and the process that passes it is
// killed there, or stopped until its lease is over and another has taken its
// place.
func crashes(d Draw) []Scenario {
	groups := []struct {
		name, title string
		proves      []string
	}{
		{"booking", "from the booking to Kafka", []string{"A2-03", "A2-04", "A2-05", "A2-08"}},
		{"bridge", "from Kafka to RabbitMQ", []string{"A2-10", "M6-18", "TRAP-M6-7", "TRAP-2-1"}},
		{"worker", "from the delivery to the ack", []string{"AC3", "M6-10", "M6-16", "OB-02", "OB-04", "TRAP-M6-9"}},
		{"session", "inside the mail session", []string{"AC3", "M6-16", "OB-02", "OB-04"}},
		{"end", "dead letters, replay and sweeper", []string{"M6-04", "M6-18", "AC7", "TRAP-1-2"}},
		{"campaign", "a campaign taken in", []string{"C-13", "C-14"}},
		{"reconciler", "UNKNOWN mails and the server's log", []string{"OB-07"}},
		{"events", "from the mail back to the booking", []string{"A2-14", "C-12"}},
	}
	all := make([]Scenario, 0, len(groups))
	for _, g := range groups {
		s := crash("crash-"+g.name, g.title, g.proves)
		s.OnDemand = true
		if g.name == "reconciler" {
			s.System.ReconcileEvery = 300 * time.Millisecond
			// A session that a process left behind is released within seconds, and
			// the log is written at once: an absence is proven then.
			s.System.Env = maps.Clone(s.System.Env)
			s.System.Env["NOTIFYD_SERVER_SESSION"], s.System.Env["NOTIFYD_PROVIDER_PROCESSING"] = "4s", "1s"
		}
		points := slices.DeleteFunc(CrashPoints(), func(p CrashPoint) bool { return p.Group != g.name })
		all = append(all, withPoints(s, points, d.CrashCell))
	}
	return all
}

const crashTitle = "killed, or stopped past its lease, at every boundary: "

func crash(name, title string, proves []string) Scenario {
	return Scenario{
		Name:   name,
		Title:  crashTitle + title,
		Proves: proves,
		Cells:  []Cell{cellResend(), cellHold(), cellSameKey()},
		// As many faults as the cell has; each needs its witness.
		Floors:     history.Floors{Confirmed: 10},
		Invariants: append(everyMail(), "cancel-is-honoured"),
		System:     crashSystem(),
		Load:       Load{Baseline: 10, PerSecond: 20},
		Quiesce:    90 * time.Second,
		Campaign:   20 * time.Minute,
		Expect:     4 * time.Minute,
	}
}

// crashShort is a line of the table for each kind of process, for every run.
func crashShort() Scenario {
	s := crash("crash-short", "one of each kind of process", []string{"AC3", "M6-16", "A2-08", "A2-10"})
	s.Cells = []Cell{cellResend()}
	s.Expect = 100 * time.Second
	short := []string{
		"booking.after-commit", "outbox.before-mark@bookingd", "bridge.after-publish", "worker.after-claim",
		"worker.after-250", "dlq.after-publish+refused", "mailevents.after-write",
	}
	return withPoints(s, slices.DeleteFunc(CrashPoints(), func(p CrashPoint) bool { return !slices.Contains(short, p.ID()) }), nil)
}

func crashSystem() System {
	s := fast()
	s.SendDeadline, s.Lease = crashDeadline, crashLease
	// As in lab-woken-worker: a stopped process keeps its messages, and the
	// sweeper hands its mails to the other one.
	s.SweepEvery, s.SweepGrace = 250*time.Millisecond, 200*time.Millisecond
	s.LettersEvery = time.Second
	s.MailServices, s.BookingServices, s.CrashPoints = 2, 2, true
	s.Env = map[string]string{
		"BOOKINGD_RELAY_SESSION_TIMEOUT": "2s", "BOOKINGD_RELAY_STANDBY": "300ms", "BOOKINGD_RELAY_MAX_REJECTIONS": "1",
		// A stopped process has room for few of the doorbells that are rung for
		// the mails that it holds: the others find the process that lives.
		"NOTIFYD_TICKET_CONSUMERS": "3", "NOTIFYD_TICKET_PREFETCH": "1", "NOTIFYD_MARKETING_PREFETCH": "1",
	}
	return s
}

// withPoints gives the scenario its points, of which want chooses cells; nil: all.
func withPoints(s Scenario, points []CrashPoint, want func(policy string, p CrashPoint, act string) bool) Scenario {
	if want == nil {
		want = func(string, CrashPoint, string) bool { return true }
	}
	chosen := func(policy string) (all []*strike) {
		for _, p := range points {
			for _, act := range []string{actKill, actPause} {
				if p.under(policy) && want(policy, p, act) {
					all = append(all, &strike{point: p, act: act, done: make(chan struct{})})
				}
			}
		}
		return all
	}
	s.FaultsOf = func(c Cell) (names []string) {
		for _, k := range chosen(c.Policy) {
			names = append(names, k.Name())
		}
		return names
	}
	s.Cells = slices.DeleteFunc(s.Cells, func(c Cell) bool { return len(s.FaultsOf(c)) == 0 })
	for _, c := range s.Cells {
		s.FaultNames = append(s.FaultNames, s.FaultsOf(c)...)
	}
	s.Faults = func(b *Bench) []faults.Fault { return newCrashRun(b, chosen(b.Cell.Policy)).faults() }
	return s
}

// faultOf is the name of a cell of the table in evidence.
func faultOf(p CrashPoint, act string) string { return crashPrefix + p.ID() + " " + act }

const crashPrefix = "crash "

const (
	// crashBatch is how many customers are sent past a point at a time.
	crashBatch = 6
	// crashTries of a batch that did not lead the chosen process past the point:
	// two processes share the work, and which of them leads is theirs to say.
	crashTries = 10
	// hitWait is how long a batch may take to reach the point.
	hitWait = 4 * time.Second
	// takeWait bounds how long a process is kept stopped for another to finish
	// what it had begun.
	takeWait = 20 * time.Second
	// crashRest bounds the wait for rest after each strike. What is not at rest
	// by then has until the end of the run.
	crashRest = 45 * time.Second
	// crashFind bounds the search for a strike's state before and after.
	crashFind = 30 * time.Second
)

// crashable is a target whose processes stop at crash points; the pipeline is one.
type crashable interface {
	target.Target
	canceller
	CrashPoints(process string) *target.CrashPoints
	States(ctx context.Context) (map[string]string, error)
	LoseDoorbells(ctx context.Context) (int, error)
	Outdate(ctx context.Context, keys []string) (int, error)
	ProduceGarbage(ctx context.Context, key, value string) error
	ParkedLike(ctx context.Context, value string) (parked, alerts int, err error)
	WriteRefusedEvent(ctx context.Context, name string) error
	DeadEvent(ctx context.Context, name string) (bool, error)
	ReplayOne(ctx context.Context, process, key string, attempts int) (target.ReplayReport, error)
	DiscardOne(ctx context.Context, process, key string) error
	CampaignWhy(ctx context.Context, c target.CampaignRequest) (target.CampaignResult, history.OpOutcome, error)
	CampaignKey(id, recipient string) string
}

// crashRun is the strikes of one cell, made one after another.
type crashRun struct {
	bench   *Bench
	target  crashable // nil: the target has no crash points
	strikes []*strike
	last    map[string]string // kind of process → the one that was struck last

	queue   chan *strike
	begin   sync.Once
	stop    context.CancelFunc
	ctx     context.Context
	stopped chan struct{}
}

func newCrashRun(b *Bench, strikes []*strike) *crashRun {
	r := &crashRun{
		bench: b, last: map[string]string{}, strikes: strikes,
		queue: make(chan *strike, len(strikes)), stopped: make(chan struct{}),
	}
	if t, ok := b.Target.(crashable); ok && b.System.CrashPoints {
		r.target = t
	}
	for _, s := range strikes {
		s.run = r
	}
	return r
}

func (r *crashRun) faults() []faults.Fault {
	all := make([]faults.Fault, len(r.strikes))
	for i, s := range r.strikes {
		all[i] = s
	}
	return all
}

// start arms the mail server for the stories and begins to work off the queue.
func (r *crashRun) start(ctx context.Context) (err error) {
	r.begin.Do(func() {
		r.ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
		for _, rule := range []script.Rule{
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To(pathRefused + "*").Rule(),
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To(pathReplayed + "*").First(1).Rule(),
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To(pathDiscarded + "*").First(1).Rule(),
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To(pathLater + "*").First(1).Rule(),
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To(pathStolen + "*").First(1).Rule(),
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To(pathOutdated + "*").Rule(),
			smtp.On(smtp.StageStored, smtp.Drop).To(pathLost + "*").First(1).Rule(),
		} {
			if _, err = r.bench.Parts.Mail.AddRule(rule); err != nil {
				return
			}
		}
		go r.work()
	})
	return err
}

func (r *crashRun) work() {
	defer close(r.stopped)
	for made := 0; made < len(r.strikes); made++ {
		select {
		case s := <-r.queue:
			s.make(r.ctx)
		case <-r.ctx.Done():
			return
		}
	}
}

// strike is one cell of the table under one policy: a fault with a campaign of
// its own batches.
type strike struct {
	run   *crashRun
	point CrashPoint
	act   string
	done  chan struct{}

	mu         sync.Mutex
	start, end int64
	batches    int
	cast       []Booking // of all batches
	struck     string    // the process
	hit        string    // the witness
	asleep     time.Duration
	took       bool // all was at rest before the process was woken
	err        error
}

func (s *strike) Name() string { return faultOf(s.point, s.act) }

// Target is the process that was struck.
func (s *strike) Target() string { return s.point.Process }

func (s *strike) Available() error {
	if s.run.target == nil {
		return errors.New("the target has no crash points, or was built without them")
	}
	return nil
}

func (s *strike) Inject(ctx context.Context) error {
	if err := s.run.start(ctx); err != nil {
		return err
	}
	s.run.queue <- s
	return nil
}

func (s *strike) Done() <-chan struct{} { return s.done }

func (s *strike) Progress() (struck, of int) {
	select {
	case <-s.done:
		return 1, 1
	default:
		return 0, 1
	}
}

// Heal ends the campaign; a strike under way is completed.
func (s *strike) Heal(ctx context.Context) error {
	if s.run.stop == nil {
		return nil
	}
	select {
	case <-s.done:
		return nil
	default:
	}
	s.run.stop()
	select {
	case <-s.run.stopped:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Span is when the strike was made, within the stretch in which all of them were.
func (s *strike) Span() (from, to int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start, s.end
}

// make makes the strike and keeps what came of it.
func (s *strike) make(ctx context.Context) {
	defer close(s.done)
	s.mu.Lock()
	s.start = history.Now()
	s.mu.Unlock()
	err := s.try(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end, s.err = history.Now(), err
}

func (s *strike) try(ctx context.Context) error {
	r := s.run.bench.Rand(s.Name())
	for range crashTries {
		passage := 1 + r.IntN(s.point.most)
		hit, err := s.batch(ctx, s.victim(), passage, s.draw(r))
		if err != nil || hit {
			return err
		}
	}
	return fmt.Errorf("%d batches of %d led no chosen process past the point", crashTries, crashBatch)
}

// victim is the process of that kind that was not struck last: after a kill the
// other one leads and has the clients.
func (s *strike) victim() target.Process {
	var kind []target.Process
	for _, p := range s.run.target.Processes() {
		if strings.HasPrefix(p.Name(), s.point.Process+"-") {
			kind = append(kind, p)
		}
	}
	i := slices.IndexFunc(kind, func(p target.Process) bool { return p.Name() == s.run.last[s.point.Process] })
	v := kind[(i+1)%len(kind)]
	s.run.last[s.point.Process] = v.Name()
	return v
}

// batch sends a few customers past the point, and strikes the process when it
// is there. It returns false when the process did not come by.
func (s *strike) batch(ctx context.Context, victim target.Process, passage int, cast []Booking) (hit bool, err error) {
	play := &play{strike: s, victim: victim, cast: cast}
	s.mu.Lock()
	s.batches++
	if s.point.Story != pathGarbage && s.point.Story != pathBroken {
		s.cast = append(s.cast, cast...)
	}
	s.mu.Unlock()
	if err := play.before(ctx); err != nil {
		return false, fmt.Errorf("before the strike: %w", err)
	}
	trap, err := s.arm(ctx, victim, passage)
	if err != nil {
		return false, err
	}
	played := make(chan error, 1)
	go func() { played <- play.past(ctx) }()
	what, err := trap.await(ctx)
	if what != "" {
		play.isCaught.Store(true)
	}
	if err != nil || what == "" {
		trap.disarm()
		return false, errors.Join(err, <-played)
	}
	switch s.act {
	case actKill:
		err = s.kill(ctx, victim, trap)
	default:
		err = s.pause(ctx, victim, trap, play)
	}
	if err = errors.Join(err, <-played); err != nil {
		return false, err
	}
	s.mu.Lock()
	s.struck, s.hit = victim.Name(), what
	s.mu.Unlock()
	return true, s.rest(ctx, play, crashRest)
}

// key of the customer's mail.
func (s *strike) key(b Booking) string {
	if s.point.Story == pathOffer {
		return s.run.target.CampaignKey(s.campaign(), b.Recipient)
	}
	return s.run.target.Key(b.ID, 1)
}

// campaign of the strike: each batch brings new recipients.
func (s *strike) campaign() string {
	return strings.NewReplacer(" ", "-", "+", "-", ".", "-").Replace(s.Name())
}

// kill starts the process again that died at the point.
func (s *strike) kill(ctx context.Context, victim target.Process, t trap) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restartBound)
	defer cancel()
	if err := t.dead(ctx); err != nil {
		return err
	}
	t.disarm()
	return victim.Restart(ctx)
}

// restartBound is how long a death and a start may take on a busy machine.
const restartBound = time.Minute

// pause keeps the process stopped until it has lost what it held and, where
// another can finish it, its mails are at rest.
func (s *strike) pause(ctx context.Context, victim target.Process, t trap, p *play) (err error) {
	began := time.Now()
	defer func() {
		if wake := victim.Resume(context.WithoutCancel(ctx)); wake != nil {
			err = errors.Join(err, fmt.Errorf("waking %s: %w", victim.Name(), wake))
		}
	}()
	if err := t.stopped(ctx); err != nil {
		return err
	}
	// Stopped already, or held by the mail server: this writes it down.
	if err := victim.Pause(ctx); err != nil {
		return fmt.Errorf("stopping %s: %w", victim.Name(), err)
	}
	t.disarm()
	if !pause(ctx, s.point.asleep) {
		return ctx.Err()
	}
	took := s.rest(ctx, p, takeWait-s.point.asleep) == nil
	s.mu.Lock()
	s.took, s.asleep = took, time.Since(began)
	s.mu.Unlock()
	return ctx.Err()
}

// rest waits until no mail is pending and the story has come to its end.
func (s *strike) rest(ctx context.Context, p *play, bound time.Duration) error {
	why := ""
	for quiet, deadline := 0, time.Now().Add(bound); ; {
		var err error
		if why, err = p.unsettled(ctx); err != nil {
			why = err.Error() // the database may be away for a moment
		}
		if quiet++; why != "" {
			quiet = 0
		}
		switch {
		case quiet >= restPolls:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("not at rest %s after the strike: %s", bound, why)
		case !pause(ctx, 100*time.Millisecond):
			return ctx.Err()
		}
	}
}

// Witness tells how the point was reached, and what the customers were told.
func (s *strike) Witness(ctx context.Context) (faults.Witness, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return faults.Witness{}, s.err
	}
	if s.hit == "" {
		return faults.Witness{}, nil
	}
	keys := make([]string, len(s.cast))
	for i, b := range s.cast {
		keys[i] = s.key(b)
	}
	text := fmt.Sprintf("%s; %d batches", s.hit, s.batches)
	if s.act == actPause {
		text += fmt.Sprintf("; %s stood still for %.1f s", s.struck, s.asleep.Seconds())
		if s.took {
			text += ", and was woken when another had brought everything to rest"
		}
	}
	return faults.Witness{Text: text, Count: 1, Keys: keys}, s.told(ctx)
}

// told compares what the booking service tells the customers with the rows.
func (s *strike) told(ctx context.Context) error {
	deadline := time.Now().Add(toldBound)
	states, err := s.run.target.States(ctx)
	if err != nil {
		return err
	}
	if s.point.Story == pathOffer {
		return nil // no booking service asked for these
	}
	for _, b := range s.cast {
		key := s.key(b)
		told, err := s.awaitTold(ctx, b, states[key], deadline)
		if err != nil {
			return err
		}
		if !toldFits(states[key], told) {
			s.run.bench.Find(verify.Fail, "told-is-true", key, fmt.Sprintf("its mail is %s, and the booking service tells %q", states[key], told))
		}
	}
	return nil
}

func (s *strike) awaitTold(ctx context.Context, b Booking, state string, deadline time.Time) (string, error) {
	for {
		told, err := s.run.target.MailTold(ctx, b.ID)
		if err != nil || toldFits(state, told) || time.Now().After(deadline) {
			return told, err
		}
		if !pause(ctx, 50*time.Millisecond) {
			return told, ctx.Err()
		}
	}
}

// toldFits says what a customer may be told of a mail in that state.
func toldFits(state, told string) bool {
	switch state {
	case "sent":
		return told == "sent" || told == "too-late"
	case "cancelled":
		return told == "cancelled"
	case "dead", "expired":
		return told == "failed"
	case "unknown":
		return told == "pending" || told == "failed"
	}
	return told == "pending" || told == ""
}
