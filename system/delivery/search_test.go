package delivery

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The search walks over every state that two workers, a mail server, a
// sweeper, a reconciler, cancels, replays and the clock can reach in any order
// with the model's row between them, and checks each state and each step.
//
// What it covers: workers that crash, are paused past their lease, lose the
// database's answer and settle again; servers that store or refuse, whose
// reply is lost, or who finish a mail after the worker is gone; messages that
// are doubled (any worker may claim at any time); a proof of absence and a
// confirmed dead letter that are acted upon late.
//
// What it does not cover: more than two workers at once, more than maxAttempts
// attempts of one mail, lost rows, and the queue (a doorbell that never comes
// is the sweeper's matter; here somebody always looks in the end).

// maxAttempts bounds the attempts of one mail over all replays, throttles and
// proofs of absence; a new row may be tried modelLimit times.
const (
	maxAttempts = 5 - fewerAttempts
	modelLimit  = 3
)

// workerState is where a worker is in one attempt.
type workerState uint8

const (
	idle workerState = iota
	claimed
	dotted // the final dot is out, no reply yet
	has250
	has4xx
	has5xx
	hasNothing // gave up waiting for a reply
)

type worker struct {
	state  workerState
	serial uint8 // which attempt, counted by the observer; 1 is the first
	token  uint8 // what the claim returned
}

// world is one state of everything. The fields after serial are the
// observer's: sets of attempts by serial, and what was promised to whom.
type world struct {
	row     modelRow
	workers [2]worker
	serial  uint8 // attempts so far

	leases     uint8 // attempts whose lease has passed
	processing uint8 // attempts whose mail the server has and has not decided on
	stored     uint8 // attempts whose mail the server kept
	faulty     uint8 // attempts that a fault left unsettled: killed, paused past the lease, reply lost

	proof    uint8 // token+1 that a proof of absence in hand covers
	letter   uint8 // death whose letter the sweeper has published and not stamped
	lettered uint8 // newest death that has a letter

	told      bool // the store was told of a 250
	cancelled bool // a cancel is on record
	aborted   bool // a 5xx ended the mail
	cancels   bool // the cancel event was delivered
	freed     bool // a throttle was used
	asked     bool // the reconciler let the mail be asked for again
	replayed  bool
}

func bit(serial uint8) uint8 { return 1 << serial }

// flags are variations of the world, searched one by one.
type flags struct {
	dedup    bool // the server drops a second copy
	noCheck  bool // the sender does not check its lease before the dot
	noProof  bool // the reconciler takes "not found so far" for absent
	campaign bool // the campaign may be stopped
	expiry   bool // the mail may expire
	sms      bool // the channel has no sender
}

// search explores one model.
type search struct {
	model
	flags
	seen  map[world]int32
	queue []node
}

type node struct {
	w      world
	parent int32
	name   string
	serial uint8
}

// step is one move out of a state; wrong says what it broke. serial is the
// attempt that it is about, 0 for none.
type step struct {
	name   string
	serial uint8
	to     world
	wrong  string
}

// run explores until the states are used up or something is broken; it returns
// the number of states, and the story of the first violation.
func (s *search) run() (states int, violation string) {
	start := world{row: modelRow{sms: s.sms}, leases: 0xff}
	s.seen = map[world]int32{start: 0}
	s.queue = []node{{w: start, parent: -1}}
	var steps []step
	for i := 0; i < len(s.queue); i++ {
		steps = s.steps(s.queue[i].w, steps[:0])
		for _, st := range steps {
			to := s.normal(st.to)
			if st.wrong == "" {
				st.wrong = s.broken(to)
			}
			if st.wrong != "" {
				return len(s.queue), s.story(int32(i), st)
			}
			if _, ok := s.seen[to]; ok {
				continue
			}
			s.seen[to] = int32(len(s.queue))
			s.queue = append(s.queue, node{to, int32(i), st.name, st.serial})
		}
	}
	return len(s.queue), ""
}

func (s *search) story(at int32, last step) string {
	lines := []string{last.wrong, told(last.name, last.serial) + "  <- here"}
	for i := at; i > 0; i = s.queue[i].parent {
		lines = append(lines, told(s.queue[i].name, s.queue[i].serial))
	}
	slices.Reverse(lines[1:])
	return strings.Join(lines, "\n")
}

func told(name string, serial uint8) string {
	if serial == 0 {
		return "  " + name
	}
	return fmt.Sprintf("  %s [attempt %d]", name, serial)
}

// normal forgets what can no longer matter, and which worker is which.
func (s *search) normal(w world) world {
	active := uint8(0)
	for _, k := range w.workers {
		if k.state != idle {
			active |= bit(k.serial)
		}
	}
	held := active
	if w.row.status == mSending {
		held |= bit(w.serial)
	}
	w.leases |= ^held
	w.faulty &= active | w.processing | w.stored
	if less(w.workers[1], w.workers[0]) {
		w.workers[0], w.workers[1] = w.workers[1], w.workers[0]
	}
	return w
}

func less(a, b worker) bool {
	if a.state != b.state {
		return a.state < b.state
	}
	return a.serial < b.serial
}

// mayDot: the worker is about to send and knows of no reason not to.
func (s *search) mayDot(w world, k worker) bool {
	return withinLease(w, k) || s.noCheck && k.state == claimed
}

func withinLease(w world, k worker) bool {
	return k.state == claimed && w.leases&bit(k.serial) == 0
}

// broken checks one state.
func (s *search) broken(w world) string {
	r := w.row
	copies := bits.OnesCount8(w.stored)
	if s.dedup {
		copies = min(copies, 1)
	}
	coming := w.processing != 0 || s.mayDot(w, w.workers[0]) || s.mayDot(w, w.workers[1])
	switch {
	case (s.policy == Hold || s.dedup) && copies > 1:
		return fmt.Sprintf("doubled: %d copies under %s", copies, s.policy)
	case copies > 1+bits.OnesCount8(w.faulty):
		return fmt.Sprintf("doubled: %d copies, %d unsettled attempts", copies, bits.OnesCount8(w.faulty))
	case r.status == mSent && copies == 0:
		return "untrue: SENT without a copy"
	case (r.status == mDead || r.status == mCancelled || r.status == mExpired) && copies > 0:
		return fmt.Sprintf("untrue: %s with a copy", modelStatusNames[r.status])
	case (r.status == mDead || r.status == mCancelled || r.status == mExpired) && coming:
		return fmt.Sprintf("untrue: %s while a copy may still come", modelStatusNames[r.status])
	case r.status == mDead && r.cancel:
		return "cancel not answered: DEAD with a cancel request"
	case r.cancel && !w.cancelled:
		return "lost: an old cancel hit a newer generation"
	case r.status == mDead && r.stamped && w.lettered != r.deaths:
		return "invisible: DEAD, stamped, without a dead letter of its own"
	case r.status == mUnknown && w.told:
		return "untrue: UNKNOWN though a 250 was reported"
	case r.status == mUnknown && s.resendable() && !s.mayGiveUp(w):
		return "given up: UNKNOWN with tries left under " + string(s.policy)
	case !s.movesOn(r):
		return "stuck: " + string(modelStatusNames[r.status]) + " and no statement that applies once its clocks ran out"
	}
	return ""
}

func (s *search) mayGiveUp(w world) bool {
	r := w.row
	return r.attempts >= r.limit || r.cancel || r.old || r.stopped || w.aborted
}

// movesOn: someone who looks at the row after all its clocks ran out can do
// something about it.
func (s *search) movesOn(r modelRow) bool {
	if r.status == absent || r.status.atRest() || r.status == mUnknown {
		return true // UNKNOWN is listed, and ends by found or proven_absent
	}
	r.due, r.over = r.status.waiting(), r.status == mSending
	_, claim := s.claim(r)
	_, over := s.leaseOver(r)
	_, expire := s.expire(r)
	_, campaign := s.cancelCampaign(r)
	return claim || over || expire || campaign || r.sms && r.status.waiting()
}

// steps lists every move out of w.
func (s *search) steps(w world, out []step) []step {
	out = s.eventSteps(w, out)
	out = s.clockSteps(w, out)
	out = s.serverSteps(w, out)
	out = s.sweeperSteps(w, out)
	out = s.reconcilerSteps(w, out)
	for i := range w.workers {
		out = s.workerSteps(w, i, out)
	}
	return out
}

// apply adds a step when a statement changed the row.
func apply(out []step, w world, name string, r modelRow, ok bool) []step {
	if !ok {
		return out
	}
	w.row = r
	return append(out, step{name: name, to: w})
}

func (s *search) eventSteps(w world, out []step) []step {
	r, ok := s.insert(w.row)
	out = apply(out, w, "insert", r, ok)

	if !w.cancels {
		// Delivered once here: a repeated one finds the same row and changes
		// nothing, which the differential test shows.
		c := w
		c.cancels = true
		if r := w.row; r.status != mSent && r.status != mExpired {
			c.cancelled = true
		}
		c.row, _ = s.cancel(w.row)
		out = append(out, step{name: "cancel", to: c})
	}
	r, ok = s.cancelOld(w.row)
	out = apply(out, w, "cancel (of an older generation)", r, ok)

	r, ok = s.cancelCampaign(w.row)
	if ok {
		c := w
		c.row, c.cancelled = r, true
		out = append(out, step{name: "cancel_campaign", to: c})
	}
	if !w.replayed {
		if r, ok := s.replay(w.row, 1); ok {
			c := w
			c.row, c.replayed, c.aborted = r, true, false
			st := step{name: "replay", to: c}
			if w.told {
				st.wrong = "needless send: a mail reported as accepted is replayed"
			}
			out = append(out, st)
		}
	}
	r, ok = s.park(w.row)
	if s.sms {
		out = apply(out, w, "park", r, ok)
	}
	return s.fromOutside(out, w, "expire", s.expire)
}

// fromOutside adds a step by someone who does not hold the row: it must leave
// a holder within its lease alone.
func (s *search) fromOutside(out []step, w world, name string, statement func(modelRow) (modelRow, bool)) []step {
	r, ok := statement(w.row)
	if !ok {
		return out
	}
	st := step{name: name, to: w}
	st.to.row = r
	if w.row.status == mSending && w.leases&bit(w.serial) == 0 {
		st.wrong = "given up: the holder is within its lease"
	}
	return append(out, st)
}

func (s *search) clockSteps(w world, out []step) []step {
	if w.row.status.waiting() && !w.row.due {
		c := w
		c.row.due = true
		out = append(out, step{name: "the wait is over", to: c})
	}
	if s.expiry && !w.row.old {
		c := w
		c.row.old = true
		out = append(out, step{name: "expires_at passes", to: c})
	}
	if s.campaign && !w.row.stopped {
		c := w
		c.row.stopped = true
		out = append(out, step{name: "the campaign is stopped", to: c})
	}
	// Leases were given one after the other and end in that order.
	for serial := uint8(1); serial <= w.serial; serial++ {
		if w.leases&bit(serial) != 0 {
			continue
		}
		c := w
		c.leases |= bit(serial)
		for _, k := range w.workers {
			if k.state != idle && k.serial == serial {
				c.faulty |= bit(serial)
			}
		}
		if w.row.status == mSending && serial == w.serial {
			c.row.over = true
		}
		out = append(out, step{name: "lease passes", serial: serial, to: c})
		break
	}
	return out
}

// serverSteps: the server finishes a mail whose worker is not listening.
func (s *search) serverSteps(w world, out []step) []step {
	for serial := uint8(1); serial <= w.serial; serial++ {
		if w.processing&bit(serial) == 0 || listens(w, serial) {
			continue
		}
		c := w
		c.processing &^= bit(serial)
		out = append(out, step{name: "server: not stored, nobody listens", serial: serial, to: c})
		c.stored |= bit(serial)
		out = append(out, step{name: "server: stored, nobody listens", serial: serial, to: c})
	}
	return out
}

func listens(w world, serial uint8) bool {
	for _, k := range w.workers {
		if k.state == dotted && k.serial == serial {
			return true
		}
	}
	return false
}

func (s *search) sweeperSteps(w world, out []step) []step {
	out = s.fromOutside(out, w, "lease_over", s.leaseOver)
	if w.row.status == mDead && !w.row.stamped && w.letter == 0 {
		c := w
		c.letter, c.lettered = w.row.deaths, w.row.deaths
		out = append(out, step{name: "dead letter and alert confirmed", to: c})
	}
	if w.letter != 0 {
		c := w
		c.letter = 0
		c.row, _ = s.stampDLQ(w.row, w.letter)
		out = append(out, step{name: "stamp_dlq", to: c})
		c.row = w.row
		out = append(out, step{name: "sweeper crashes before stamp_dlq", to: c})
	}
	return out
}

func (s *search) reconcilerSteps(w world, out []step) []step {
	if w.stored != 0 {
		r, ok := s.found(w.row)
		out = apply(out, w, "found", r, ok)
	}
	if !w.asked {
		if r, ok := s.askAgain(w.row, w.row.token); ok {
			c := w
			c.row, c.asked = r, true
			out = append(out, step{name: "ask_again", to: c})
		}
	}
	// The proof trusts that nobody sends past his lease: it looks at the end of
	// the lease, since it cannot look at the workers.
	proven := w.stored == 0 && w.processing == 0 && !withinLease(w, w.workers[0]) && !withinLease(w, w.workers[1])
	if w.row.status == mUnknown && w.proof == 0 && (proven || s.noProof && w.stored == 0) {
		c := w
		c.proof = w.row.token + 1
		out = append(out, step{name: "reconciler proves absence", to: c})
	}
	if w.proof != 0 {
		c := w
		c.proof = 0
		out = append(out, step{name: "reconciler drops its proof", to: c})
		r, ok := s.provenAbsent(w.row, w.proof-1)
		if ok {
			c.row, c.aborted = r, false
			out = append(out, step{name: "proven_absent", to: c})
			c.proof = w.proof
			out = append(out, step{name: "proven_absent (a second reconciler has the same proof)", to: c})
		}
	}
	return out
}

func (s *search) workerSteps(w world, i int, out []step) []step {
	k := w.workers[i]
	if k.state == idle {
		return s.claimSteps(w, i, out)
	}
	out = s.crash(w, i, out)
	switch k.state {
	case claimed:
		out = append(out, with(w, i, has4xx, "worker: refused before the dot, may pass"))
		out = append(out, with(w, i, has5xx, "worker: refused before the dot, for good"))
		if s.mayDot(w, k) {
			st := with(w, i, dotted, "worker: dot")
			st.to.processing |= bit(k.serial)
			st.wrong = needless(w, k.serial)
			out = append(out, st)
		}
	case dotted:
		out = s.replySteps(w, i, out)
	default:
		out = s.settleSteps(w, i, out)
	}
	return out
}

// needless: a further dot needs each earlier mail to be unsettled by a fault.
func needless(w world, serial uint8) string {
	earlier := (w.stored | w.processing) & (bit(serial) - 1)
	if earlier&^w.faulty != 0 {
		return "needless send: an earlier attempt is under way or delivered, and no fault left it unsettled"
	}
	return ""
}

func with(w world, i int, state workerState, name string) step {
	w.workers[i].state = state
	return step{name: name, serial: w.workers[i].serial, to: w}
}

func (s *search) crash(w world, i int, out []step) []step {
	c := w
	c.faulty |= bit(w.workers[i].serial)
	c.workers[i] = worker{}
	return append(out, step{name: "worker: crashes", serial: w.workers[i].serial, to: c})
}

func (s *search) claimSteps(w world, i int, out []step) []step {
	if i == 1 && w.workers[0].state == idle || w.serial == maxAttempts {
		return out
	}
	r, ok := s.claim(w.row)
	if !ok {
		return out
	}
	c := w
	c.row = r
	c.serial++
	c.leases &^= bit(c.serial)
	c.workers[i] = worker{state: claimed, serial: c.serial, token: r.token}
	st := step{name: "claim", serial: c.serial, to: c}
	switch {
	case w.told:
		st.wrong = "needless send: claimed though a 250 was reported"
	case w.cancelled:
		st.wrong = "cancel not honoured: claimed after it was on record"
	case w.row.old:
		st.wrong = "stale: claimed past expires_at"
	case w.row.stopped:
		st.wrong = "cancel not honoured: claimed after the campaign was stopped"
	case w.row.status.waiting() && !w.row.due:
		st.wrong = "not spaced: claimed before next_attempt_at"
	case r.attempts > r.limit:
		st.wrong = "too many tries: attempts above the limit"
	}
	return append(out, st)
}

// replySteps: what comes back after the dot.
func (s *search) replySteps(w world, i int, out []step) []step {
	serial := w.workers[i].serial
	stores, drops := w, w
	stores.processing &^= bit(serial)
	stores.stored |= bit(serial)
	drops.processing &^= bit(serial)
	lost := func(w world, name string) step {
		st := with(w, i, hasNothing, name)
		st.to.faulty |= bit(serial)
		return st
	}
	return append(out,
		with(stores, i, has250, "server: stored, 250"),
		lost(stores, "server: stored, reply lost"),
		with(drops, i, has4xx, "server: 4xx after the dot"),
		with(drops, i, has5xx, "server: 5xx after the dot"),
		lost(drops, "server: not stored, reply lost"),
		lost(w, "worker: no reply in time, server goes on"),
	)
}

// settleSteps: the worker reports what it has. It may lose the answer of the
// database and report again.
func (s *search) settleSteps(w world, i int, out []step) []step {
	k := w.workers[i]
	both := func(c world, name string) {
		out = append(out, step{name: name, serial: k.serial, to: c}) // the database's answer is lost
		c.workers[i] = worker{}
		out = append(out, step{name: name, serial: k.serial, to: c})
	}
	c := w
	switch k.state {
	case has250:
		name := "accepted"
		var ok bool
		if c.row, ok = s.accepted(w.row, k.token); !ok {
			name = "accepted_late"
			c.row, _ = s.acceptedLate(w.row, k.token)
		}
		c.told = true
		both(c, name)
	case has4xx:
		c.row, _ = s.transient(w.row, k.token, false)
		both(c, "transient")
		if !w.freed && w.row.attempts > 0 {
			c = w
			c.freed = true
			c.row, _ = s.transient(w.row, k.token, true)
			both(c, "transient (free)")
		}
	case has5xx:
		var ok bool
		c.row, ok = s.permanent(w.row, k.token)
		c.aborted = c.aborted || ok
		both(c, "permanent")
	case hasNothing:
		c.row, _ = s.ambiguous(w.row, k.token)
		both(c, "ambiguous")
	}
	return out
}

func newSearch(p Policy, f flags, off ...guard) *search {
	s := &search{model: model{policy: p, attempts: modelLimit, off: map[guard]bool{}}, flags: f}
	for _, g := range off {
		s.off[g] = true
	}
	return s
}

func TestSearchFindsNoViolation(t *testing.T) {
	begin, total := time.Now(), 0
	steps, statuses := map[string]int{}, map[Status]int{}
	for _, c := range worlds() {
		t.Run(c.name, func(t *testing.T) {
			start := time.Now()
			s := newSearch(c.policy, c.flags)
			states, violation := s.run()
			require.Empty(t, violation)
			for _, n := range s.queue {
				steps[n.name]++
				statuses[modelStatusNames[n.w.row.status]]++
			}
			total += states
			t.Logf("%d states in %s", states, time.Since(start).Round(time.Millisecond))
		})
	}
	t.Logf("%d states in all, %s", total, time.Since(begin).Round(time.Millisecond))

	// A search that never takes a step, or never sees a state, proves nothing
	// about it.
	for _, name := range []string{
		"insert", "claim", "accepted", "accepted_late", "transient", "transient (free)", "permanent", "ambiguous",
		"lease_over", "cancel", "cancel_campaign", "expire", "park", "replay", "found", "proven_absent", "ask_again", "stamp_dlq",
		"lease passes", "worker: crashes", "worker: dot", "server: stored, nobody listens",
	} {
		require.NotZero(t, steps[name], "no state was reached by %q", name)
	}
	for _, status := range modelStatusNames {
		require.NotZero(t, statuses[status], "%s was never reached", status)
	}
}

type namedWorld struct {
	name   string
	policy Policy
	flags  flags
}

func worlds() []namedWorld {
	return []namedWorld{
		{"same-key", SameKey, flags{dedup: true}},
		{"resend", Resend, flags{}},
		{"hold", Hold, flags{}},
		{"resend, campaign that may be stopped", Resend, flags{campaign: true}},
		{"hold, campaign that may be stopped", Hold, flags{campaign: true}},
		{"resend, mail that may expire", Resend, flags{expiry: true}},
		{"hold, mail that may expire", Hold, flags{expiry: true}},
		{"a channel without a sender", Resend, flags{sms: true, expiry: true}},
	}
}

// sender and reconciler are guards that stand outside the row.
const (
	gSenderCheck guard = "sender: checks its lease before the dot"
	gReconciler  guard = "reconciler: absent only as proof"
)

// removal says what the search must find when guards are taken away.
type removal struct {
	guards []guard
	policy Policy
	flags  flags
	finds  string // the violation's first word or words
}

func removals() []removal {
	one := func(g guard, p Policy, finds string) removal {
		return removal{[]guard{g}, p, flags{dedup: p == SameKey}, finds}
	}
	return []removal{
		one(gInsertAbsent, Resend, "cancel not honoured"),
		one(gClaimDue, Resend, "not spaced"),
		one(gClaimLimit, Resend, "too many tries"),
		one(gClaimCancel, Resend, "cancel not honoured"),
		one(gClaimFlag, Resend, "needless send"),
		one(gClaimWaiting, Hold, "needless send"),
		one(gClaimLeaseOver, SameKey, "needless send"),
		one(gClaimLeaseOver, Resend, "needless send"),
		one(gClaimResendable, Hold, "doubled"),
		one(gClaimToken, Resend, "untrue: DEAD"),
		one(gClaimUnsettled, Resend, "untrue: CANCELLED"),
		{[]guard{gClaimOld}, Resend, flags{expiry: true}, "stale"},
		{[]guard{gClaimStopped}, Resend, flags{campaign: true}, "cancel not honoured"},

		one(gLateWaiting, Resend, "untrue: UNKNOWN"),
		one(gLateUnknown, Hold, "untrue: UNKNOWN"),
		one(gLateFlag, Resend, "needless send"),

		one(gTransientToken, Resend, "untrue: CANCELLED"),
		one(gTransientSending, Resend, "untrue: CANCELLED"),
		one(gTransientUsedUp, Hold, "stuck"),
		one(gTransientCancel, Hold, "stuck"),
		one(gTransientFlag, Resend, "stuck"),
		one(gPermanentToken, Resend, "untrue: DEAD"),
		one(gPermanentSending, Resend, "untrue: DEAD"),
		one(gPermanentFlag, Resend, "untrue: UNKNOWN"),
		one(gAmbiguousToken, Resend, "needless send"),
		one(gAmbiguousHold, Hold, "doubled"),
		one(gAmbiguousUsedUp, Resend, "stuck"),
		one(gAmbiguousCancel, Resend, "stuck"),
		one(gAmbiguousFlag, Resend, "stuck"),
		one(gAmbiguousUnsettled, Resend, "untrue: CANCELLED"),
		one(gEndUnsettled, Resend, "untrue: DEAD"),
		one(gEndCancel, Hold, "cancel not answered"),
		one(gEndUnstamped, Hold, "invisible"),

		one(gLeaseOverPast, Hold, "given up"),
		one(gLeaseOverNobody, Resend, "given up"),
		one(gLeaseOverCancel, Resend, "stuck: SENDING"),
		one(gLeaseOverFlag, Resend, "untrue: UNKNOWN"),

		one(gCancelGeneration, Hold, "lost"),
		one(gCancelTombstone, Hold, "cancel not honoured"),
		one(gCancelUnsettled, Resend, "untrue: CANCELLED"),
		one(gCancelSending, Hold, "untrue: CANCELLED"),
		one(gCancelUnknown, Hold, "untrue: CANCELLED"),
		one(gCancelSent, Hold, "untrue: CANCELLED"),
		{[]guard{gExpireWaiting}, Hold, flags{expiry: true}, "given up"},
		{[]guard{gExpireUnsettled}, Resend, flags{expiry: true}, "untrue: EXPIRED"},

		one(gReplayDead, Hold, "needless send"),
		one(gReplayToken, Resend, "untrue"),
		one(gReplayLimit, Hold, "stuck: PENDING"),
		one(gAbsentToken, Hold, "untrue: CANCELLED"),
		one(gAbsentCancel, Hold, "stuck: PENDING"),
		one(gAbsentLimit, Hold, "stuck: PENDING"),
		one(gAskUnknown, SameKey, "needless send"),
		one(gAskPolicy, Hold, "doubled"),
		one(gAskCancel, SameKey, "stuck: PENDING"),
		one(gAskLimit, SameKey, "stuck: PENDING"),
		one(gAskUnsettled, SameKey, "untrue"),
		one(gStampVersion, Hold, "invisible"),

		{[]guard{gSenderCheck}, Hold, flags{noCheck: true}, "untrue"},
		{[]guard{gReconciler}, Hold, flags{noProof: true}, "untrue"},

		// Two of the table's guards stand behind another one; each pair
		// without both.
		{[]guard{gReplayCancel, gEndCancel}, Hold, flags{}, "cancel not answered"},
		{[]guard{gAbsentUnknown, gAbsentToken}, Hold, flags{}, "untrue"},
	}
}

func TestEachGuardTakenAwayBringsAViolation(t *testing.T) {
	for _, r := range removals() {
		t.Run(fmt.Sprint(r.guards, " ", r.policy), func(t *testing.T) {
			t.Parallel()
			states, violation := newSearch(r.policy, r.flags, r.guards...).run()
			t.Logf("%s: %d states, %s", r.policy, states, violation)
			require.True(t, strings.HasPrefix(violation, r.finds), "found %q, want %q", violation, r.finds)
		})
	}
}
