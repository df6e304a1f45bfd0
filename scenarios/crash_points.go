package scenarios

import (
	"slices"
	"strings"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

// CrashPoint is one boundary between two steps of the pipeline. Most are crash
// points of the system's tagged build; the stages of a mail session are held by
// the mail server, so that no step of the system is needed to find them.
type CrashPoint struct {
	// Name of the crash point in the source, or "smtp." and the stage.
	Name string
	// Story is what leads past it, and part of the cell's name where several do.
	Story string
	// Group is the scenario that runs it: "crash-" and this.
	Group string
	// Process is the kind of process that passes it: bookingd, notifyd.
	Process string
	// Between says which steps it stands between.
	Between string
	// Policies under which it is run; nil: resend and hold.
	Policies []string

	stage script.Stage // held there by the mail server; "": a crash point of the build
	// most: the point acts at a passage drawn from 1 to this.
	most int
	// asleep is how long a stopped process stays stopped at least: past its
	// lease, its session, its membership, whichever counts there.
	asleep time.Duration
}

// ID names the point in cells and commands.
func (p CrashPoint) ID() string {
	id := p.Name
	if strings.HasPrefix(p.Name, "outbox.") {
		id += "@" + p.Process // the same code relays for both services
	}
	if p.Story != pathSent {
		id += "+" + p.Story
	}
	return id
}

// How long a process is stopped: the system's own limit in these scenarios, and
// time for another process to notice.
const (
	pastLease   = crashLease + 2*time.Second
	pastSession = crashSession + 3*time.Second // of the consumer group, and a rebalance
	pastRelay   = 4 * time.Second              // bookingd's relay session of 2 s
	pastRelay10 = 13 * time.Second             // notifyd's relay session of 10 s
)

const (
	crashLease    = 2 * time.Second
	crashDeadline = time.Second
	// crashSession is the shortest that brokers allow by default.
	crashSession = 6 * time.Second
)

// The stories; each is the beginning of its customers' addresses.
const (
	pathSent      = "sent"      // confirmed
	pathCancelled = "cancelled" // confirmed and at once cancelled
	pathRefused   = "refused"   // 550 at RCPT: dead at the first try
	pathLater     = "later"     // 451 at the first RCPT, accepted at the second
	pathLost      = "lost"      // the first 250 is lost
	pathReplayed  = "replayed"  // dead, then replayed
	pathDiscarded = "discarded" // dead, discarded, then replayed by name
	pathAgain     = "again"     // sent, then sent again for a customer who asks
	pathStolen    = "stolen"    // waits for its next try when its doorbell is lost
	pathOutdated  = "outdated"  // the same, and worthless by then
	pathOrphan    = "orphan"    // its worker is killed at DATA, and its lease runs out
	pathGarbage   = "garbage"   // a record that nobody can read
	pathBroken    = "broken"    // an event that the broker refuses
	pathOffer     = "offer"     // a campaign's mail
)

func holdOnly() []string   { return []string{"hold"} }
func resendOnly() []string { return []string{"resend"} }

// everyPolicy is for the points at which the receiver decides what a second try
// does.
func everyPolicy() []string { return []string{"resend", "hold", "same-key"} }

// CrashPoints is every boundary, in the order of a mail's life. A crash point
// that stands in the source and not here fails TestEveryCrashPointIsInTheTable,
// and the other way round.
func CrashPoints() []CrashPoint {
	var all []CrashPoint
	add := func(group, process string, asleep time.Duration, points ...CrashPoint) {
		for _, p := range points {
			p.Group, p.Process, p.asleep = group, process, asleep
			if p.Story == "" {
				p.Story = pathSent
			}
			p.most = max(p.most, 1)
			all = append(all, p)
		}
	}
	// What the policy has no say in is run under one.
	add("booking", "bookingd", pastSession, // the idle transaction of a stopped process is ended after 5 s
		CrashPoint{Name: "booking.before-commit", most: 2, Between: "booking and outbox row written → committed"},
		CrashPoint{Name: "booking.after-commit", most: 2, Between: "committed → relay rung, client answered"},
	)
	relay := []CrashPoint{
		{Name: "outbox.before-produce", Between: "rows read → given to the producer"},
		{Name: "outbox.after-produce", Between: "given to the producer → acknowledged by Kafka"},
		{Name: "outbox.before-mark", Between: "acknowledged → marked published"},
		{Name: "outbox.after-mark", Between: "marked published → next batch"},
	}
	add("booking", "bookingd", pastRelay, relay...)
	add("booking", "bookingd", pastRelay,
		CrashPoint{Name: "outbox.after-dead", Story: pathBroken, Policies: resendOnly(), Between: "event marked dead → alert"},
		CrashPoint{Name: "outbox.after-alert", Story: pathBroken, Policies: resendOnly(), Between: "alert → stamp of the alert"},
	)
	add("bridge", "notifyd", pastSession,
		CrashPoint{Name: "bridge.after-poll", Between: "events fetched → rows inserted"},
		CrashPoint{Name: "bridge.after-park", Story: pathGarbage, Policies: resendOnly(), Between: "unreadable event parked → alert"},
		CrashPoint{Name: "bridge.after-rows", Between: "rows inserted → stale ones alerted"},
		CrashPoint{Name: "bridge.after-insert", Between: "rows inserted → cancels applied"},
		CrashPoint{Name: "bridge.after-cancel", Story: pathCancelled, Between: "cancels applied → doorbells published"},
		CrashPoint{Name: "bridge.after-publish", Between: "doorbells confirmed → rows stamped"},
		CrashPoint{Name: "bridge.after-stamp", Between: "rows stamped → offsets committed"},
		CrashPoint{Name: "bridge.after-commit", Between: "offsets committed → next poll"},
	)
	add("worker", "notifyd", pastLease,
		CrashPoint{Name: "worker.after-delivery", most: 3, Policies: everyPolicy(), Between: "delivered → claimed"},
		CrashPoint{Name: "worker.after-claim", most: 2, Policies: everyPolicy(), Between: "claimed → rendered"},
		CrashPoint{Name: "worker.after-render", most: 2, Policies: everyPolicy(), Between: "rendered mail stored → connection"},
	)
	for _, stage := range []struct {
		stage   script.Stage
		between string
	}{
		{smtp.StageEHLO, "connected → greeted"},
		{smtp.StageMail, "MAIL sent → answered"},
		{smtp.StageRcpt, "RCPT sent → answered"},
		{smtp.StageData, "DATA sent → answered"},
		{smtp.StageBody, "headers sent → rest of the mail"},
		{smtp.StageDot, "dot read by the server → copy kept"},
		{smtp.StageStored, "copy kept → 250 written"},
	} {
		add("session", "notifyd", pastLease, CrashPoint{
			Name: "smtp." + string(stage.stage), stage: stage.stage, Policies: everyPolicy(), Between: stage.between,
		})
	}
	add("worker", "notifyd", pastLease,
		CrashPoint{Name: "worker.before-dot", most: 2, Policies: everyPolicy(), Between: "mail sent → final dot"},
		CrashPoint{Name: "worker.after-250", most: 2, Policies: everyPolicy(), Between: "250 read → settled"},
		CrashPoint{Name: "worker.after-failure", Story: pathLater, most: 2, Between: "refusal read → settled"},
		CrashPoint{Name: "worker.after-settle", most: 2, Policies: everyPolicy(), Between: "settled SENT → acked"},
		CrashPoint{Name: "worker.after-settle", Story: pathLater, most: 2, Between: "settled FAILED → successor published"},
		CrashPoint{Name: "worker.after-publish", Story: pathLater, most: 2, Between: "successor confirmed → acked"},
		CrashPoint{Name: "worker.after-settle", Story: pathLost, most: 2, Policies: holdOnly(), Between: "settled UNKNOWN → alert"},
		CrashPoint{Name: "worker.after-trace", Story: pathLost, most: 2, Policies: holdOnly(), Between: "alert → acked"},
		CrashPoint{Name: "worker.after-ack", most: 3, Policies: everyPolicy(), Between: "acked → next delivery"},
	)
	add("end", "notifyd", pastLease,
		CrashPoint{Name: "worker.after-settle", Story: pathRefused, most: 2, Between: "settled DEAD → dead letter published"},
		CrashPoint{Name: "dlq.after-publish", Story: pathRefused, most: 2, Between: "dead letter confirmed → alert"},
		CrashPoint{Name: "dlq.after-alert", Story: pathRefused, most: 2, Between: "alert → stamp of the dead letter"},
		CrashPoint{Name: "dlq.after-stamp", Story: pathRefused, most: 2, Between: "dead letter stamped → acked"},
		CrashPoint{Name: "sweeper.after-overdue", Story: pathStolen, Between: "overdue rows noted → doorbells rung again"},
		CrashPoint{Name: "sweeper.after-ring", Story: pathStolen, Between: "doorbells confirmed → next round"},
		CrashPoint{Name: "sweeper.after-leases", Story: pathOrphan, Policies: holdOnly(), Between: "leases ended as UNKNOWN → alert"},
		CrashPoint{Name: "sweeper.after-expired", Story: pathOutdated, Between: "rows ended as EXPIRED → alert"},
		CrashPoint{Name: "replay.after-move", Story: pathReplayed, Between: "row PENDING again → doorbell published"},
		CrashPoint{Name: "replay.after-ring", Story: pathReplayed, Between: "doorbell confirmed → dead letter removed"},
		CrashPoint{Name: "letters.after-remove", Story: pathReplayed, Between: "dead letter acked → next letter"},
		CrashPoint{Name: "replay.after-letters", Story: pathReplayed, Between: "dead letters removed → operator answered"},
		CrashPoint{Name: "discard.after-audit", Story: pathDiscarded, Policies: resendOnly(), Between: "discard written down → dead letter removed"},
	)
	add("campaign", "notifyd", pastLease,
		CrashPoint{Name: "campaign.after-read", Story: pathOffer, Policies: resendOnly(), Between: "lines read → rows inserted"},
		CrashPoint{Name: "campaign.after-insert", Story: pathOffer, Policies: resendOnly(), Between: "rows inserted → messages published"},
		CrashPoint{Name: "campaign.after-publish", Story: pathOffer, Policies: resendOnly(), Between: "messages confirmed → rows stamped"},
		CrashPoint{Name: "campaign.after-stamp", Story: pathOffer, Policies: resendOnly(), Between: "rows stamped → caller answered"},
	)
	add("reconciler", "notifyd", pastLease,
		CrashPoint{Name: "reconciler.after-lookup", Story: pathLost, Policies: holdOnly(), Between: "copy found in the server's log → row SENT"},
		CrashPoint{Name: "reconciler.after-move", Story: pathOrphan, Policies: holdOnly(), Between: "absence proven, row PENDING again → doorbell"},
		CrashPoint{Name: "reconciler.after-ring", Story: pathOrphan, Policies: holdOnly(), Between: "doorbell confirmed → next UNKNOWN mail"},
	)
	add("events", "notifyd", pastRelay10, relay...)
	add("events", "bookingd", pastSession,
		CrashPoint{Name: "mailevents.after-poll", Between: "mail events fetched → written"},
		CrashPoint{Name: "mailevents.after-write", Between: "written → offsets committed"},
		CrashPoint{Name: "mailevents.after-commit", Between: "offsets committed → next poll"},
	)
	return all
}

// elsewhere are crash points that the table does not run yet, each with the
// reason.
func elsewhere() map[string]string {
	return map[string]string{
		"letters.after-ring":      "notifyd.TestDeadMailsAreReplayed: a command is killed, the next one rings",
		"send-again.after-insert": "notifyd.TestSendAgainKilledAtEachStep",
		"send-again.after-ring":   "notifyd.TestSendAgainKilledAtEachStep",
		"worker.after-park":       "notifyd.TestUnreadableMessageKilledBeforeItsAlert",
	}
}

func (p CrashPoint) under(policy string) bool {
	if p.Policies == nil {
		return policy == "resend" || policy == "hold"
	}
	return slices.Contains(p.Policies, policy)
}

// Fits reports whether a filter of the command line means this point: the ID of
// one, or else the beginning of several up to a dot, "@" or "+".
func (p CrashPoint) Fits(filter string) bool {
	if slices.ContainsFunc(CrashPoints(), func(q CrashPoint) bool { return q.ID() == filter }) {
		return p.ID() == filter
	}
	rest, ok := strings.CutPrefix(p.ID(), filter)
	return ok && (rest == "" || strings.ContainsAny(rest[:1], ".@+") || strings.HasSuffix(filter, "."))
}
