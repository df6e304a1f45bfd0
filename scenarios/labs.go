package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/target"
	"mailproof/verify"
)

// labs tells the experiments of the requirements' §6 in one start of the parts:
// each has an outcome that must be seen again. A story is told once, while other
// customers book; it plays on the running pipeline, or, where the experiment is
// about two statements that meet, on an empty copy of the system's own table
// beside it, with its constraints and indexes and without its workers.
//
// A story that could not be told leaves no witness, and the run is invalid; one
// whose outcome was not seen is a finding.
func labs(chosen ...string) Scenario {
	stories := storiesOf(chosen)
	s := Scenario{
		Name:       labsName,
		Title:      "the experiments of the requirements' §6, each with the outcome that must be seen",
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: len(stories)},
		Invariants: append(everyMail(), "cancel-is-honoured"),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 490, PerSecond: 24},
		Expect:     60 * time.Second,
		Judge:      judgeLabs,
	}
	// As in lab-cancel: a held mail must outlive the way of its cancel.
	s.System.SendDeadline, s.System.Lease = 6*time.Second, 9*time.Second
	s.System.BookingServices = 2
	for _, x := range stories {
		s.FaultNames = append(s.FaultNames, x.name)
		s.Proves = append(s.Proves, strings.ToUpper(x.name))
	}
	s.Faults = func(b *Bench) []faults.Fault {
		told := make([]faults.Fault, len(stories))
		for i, x := range stories {
			told[i] = newTelling(b, x)
		}
		return told
	}
	return s
}

const labsName = "lab"

// labStory is one experiment.
type labStory struct {
	name string // lab-four: LAB-FOUR of the requirements
	what string // the set-up
	want string // the outcome that must be seen, word for word
	tell func(ctx context.Context, s *stage) (seen string, err error)
	// after, if it is not nil, sees what tell has begun, once the run has come to
	// rest.
	after func(ctx context.Context, s *stage) (seen string, err error)
}

func allStories() []labStory { return append(statementStories(), pipelineStories()...) }

// storiesOf are those of the names, all without one.
func storiesOf(names []string) []labStory {
	return slices.DeleteFunc(allStories(), func(x labStory) bool { return len(names) > 0 && !slices.Contains(names, x.name) })
}

func storyNames() []string {
	all := allStories()
	names := make([]string, len(all))
	for i, x := range all {
		names[i] = x.name
	}
	return names
}

func isStory(name string) bool { return len(storiesOf([]string{name})) == 1 && name != "" }

// stage is what a story has.
type stage struct {
	*Bench
	story   labStory
	booking Booking // the story's own customer, not in the plan
	schema  string  // of its copy of the table
}

// labBound ends a story's wait for one thing.
const labBound = 30 * time.Second

// database is a new connection to one of the system's databases.
func (s *stage) database(ctx context.Context, name string) (*pgx.Conn, error) {
	all := s.Target.Databases()
	i := slices.IndexFunc(all, func(d target.Database) bool { return d.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("the target has no database %q", name)
	}
	conn, err := pgx.Connect(ctx, all[i].URL)
	if err != nil {
		return nil, fmt.Errorf("database %s: %w", name, err)
	}
	return conn, nil
}

// read is one value from the system's database.
func read[T any](ctx context.Context, s *stage, database, sql string, args ...any) (T, error) {
	var v T
	conn, err := s.database(ctx, database)
	if err != nil {
		return v, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // only read
	err = conn.QueryRow(ctx, sql, args...).Scan(&v)
	return v, err
}

// await returns when what a query reads satisfies ok, and what it was.
func await[T any](ctx context.Context, s *stage, what, database, sql string, ok func(T) bool, args ...any) (T, error) {
	deadline := time.Now().Add(labBound)
	for {
		v, err := read[T](ctx, s, database, sql, args...)
		if err == nil && ok(v) {
			return v, nil
		}
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return v, fmt.Errorf("%s: %w", what, err)
		}
		if time.Now().After(deadline) || !pause(ctx, 50*time.Millisecond) {
			return v, fmt.Errorf("%s: not within %s", what, labBound)
		}
	}
}

// telling is a story on its way, as a campaign of one strike.
type telling struct {
	stage *stage
	done  chan struct{}
	stop  context.CancelFunc
	seen  string
	err   error
}

func newTelling(b *Bench, x labStory) *telling {
	return &telling{done: make(chan struct{}), stage: &stage{
		Bench: b, story: x, schema: strings.ReplaceAll(x.name, "-", "_"),
		booking: Booking{ID: drawUUID(b.Rand(x.name)), Recipient: x.name + "@customers.test"},
	}}
}

func (t *telling) Name() string          { return t.stage.story.name }
func (t *telling) Target() string        { return t.stage.story.what }
func (*telling) Available() error        { return nil }
func (t *telling) Done() <-chan struct{} { return t.done }

func (t *telling) Progress() (struck, of int) {
	select {
	case <-t.done:
		return 1, 1
	default:
		return 0, 1
	}
}

func (t *telling) Inject(ctx context.Context) error {
	ctx, t.stop = context.WithTimeout(context.WithoutCancel(ctx), 3*labBound)
	go func() {
		defer close(t.done)
		t.seen, t.err = t.stage.story.tell(ctx, t.stage)
	}()
	return nil
}

func (t *telling) Heal(ctx context.Context) error {
	if t.stop == nil {
		return nil
	}
	t.stop()
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// seenMark stands before what was seen, in the witness of a story.
const seenMark = "seen outcome: "

func (t *telling) Witness(ctx context.Context) (faults.Witness, error) {
	if t.stop == nil {
		return faults.Witness{}, nil // unplugged
	}
	if t.err == nil && t.stage.story.after != nil {
		t.seen, t.err = t.stage.story.after(ctx, t.stage)
	}
	if t.err != nil {
		return faults.Witness{}, t.err
	}
	// What a story does to its customer's mail, nobody else asked for.
	keys := []string{t.stage.Target.Key(t.stage.booking.ID, 1)}
	return faults.Witness{Text: "expected outcome: " + t.stage.story.want + "; " + seenMark + t.seen, Count: 1, Keys: keys}, nil
}

// judgeLabs compares what each story saw with what must be seen.
func judgeLabs(h *history.History, own *ownFindings) {
	for _, x := range allStories() {
		i := slices.IndexFunc(h.Faults, func(f history.Fault) bool { return f.Name == x.name })
		if i < 0 {
			continue // not chosen
		}
		id := strings.ToUpper(x.name)
		_, seen, told := strings.Cut(h.Faults[i].Witness, seenMark)
		if !told {
			own.check(id, x.what+": expected outcome: "+x.want+"; not seen", 0)
			continue // without a witness the run is invalid already
		}
		own.check(id, x.what+": expected outcome: "+x.want+"; "+seenMark+seen, 1)
		if seen != x.want {
			own.find(verify.Fail, id, "", "expected outcome: "+x.want+"; "+seenMark+seen)
		}
	}
}
