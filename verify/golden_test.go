package verify_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

// Every life that the system's rules allow passes every invariant, alone and
// all of them in one run.
func TestGoodHistoriesPass(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		policy, server := mode[0], mode[1]
		named := lives(policy, server)
		maps.Copy(named, struckLives(policy, server))
		for _, name := range slices.Sorted(maps.Keys(named)) {
			t.Run(policy+"/"+server+"/"+name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(policy, server)
				w.mail("first").delivered()
				named[name](w.mail("b1"))
				requirePass(t, w.rest().judge())
			})
		}
		t.Run(policy+"/"+server+"/all in one run", func(t *testing.T) {
			t.Parallel()
			w := newWorld(policy, server)
			for i, name := range slices.Sorted(maps.Keys(named)) {
				named[name](w.mail(simName(i)))
			}
			requirePass(t, w.rest().judge())
		})
	}
}

// A fault may put a cancel on the topic before the customer's own is called.
func TestACancelThatAFaultSentAhead(t *testing.T) {
	t.Parallel()
	build := func(named bool) verify.Result {
		w := newWorld("hold", "plain")
		w.mail("first").delivered()
		m := w.mail("b1")
		m.op("confirm", history.OpOK)
		m.relayed()
		f := w.fault("cancels", "", time.Second)
		if named {
			f.Keys = []string{m.key}
		}
		m.change(map[string]string{"status": "CANCELLED", "cancel_requested": "true"})
		w.pass(time.Second)
		m.op("cancel", history.OpOK)
		return w.rest().judge()
	}
	lost := func(r verify.Result) bool {
		return slices.ContainsFunc(r.Findings, func(f verify.Finding) bool { return f.Invariant == "nothing-lost" })
	}
	require.False(t, lost(build(true)), "the fault names the mail")
	require.True(t, lost(build(false)), "it names another's")
}

// The mails of a campaign are judged like those of bookings, by their own policy.
func TestGoodCampaignsPass(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for _, name := range slices.Sorted(maps.Keys(campaignLives())) {
			t.Run(mode[0]+"/"+mode[1]+"/"+name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(mode[0], mode[1])
				w.mail("first").delivered()
				campaignLives()[name](w.campaign("spring", history.OpOK, "c1")[0])
				requirePass(t, w.rest().judge())
			})
		}
		t.Run(mode[0]+"/"+mode[1]+"/unknown to the client", func(t *testing.T) {
			t.Parallel()
			w := newWorld(mode[0], mode[1])
			w.mail("first").delivered()
			w.campaign("winter", history.OpOK, "c0")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
			// One of the two had been taken when the answer got lost.
			w.campaign("spring", history.OpUnknown, "c1", "c2")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
			requirePass(t, w.rest().judge())
		})
	}
}

func TestCampaignsAreCountedApart(t *testing.T) {
	t.Parallel()
	w := newWorld("resend", "plain")
	w.mail("first").delivered()
	for i, m := range w.campaign("spring", history.OpOK, "c1", "c2", "c3", "c4") {
		campaignLives()[[]string{"delivered", "answer lost, held", "expired, one alert for all", "stopped before the claim"}[i]](m)
	}
	res := w.rest().judge()
	requirePass(t, res)
	require.Equal(t, verify.Counts{
		Confirmed: 1, Delivered: 1,
		Campaign: &verify.Counts{Confirmed: 4, Delivered: 2, Unknown: 1, Expired: 1, Cancelled: 1},
	}, res.Counts)
	require.Equal(t, 1, res.Latency.N, "a campaign's mails have no time at which they are due")
}

func requirePass(t require.TestingT, res verify.Result) {
	if res.Verdict == verify.Pass {
		for _, c := range res.Checked {
			require.Empty(t, c.Skipped, c.Name)
		}
		return
	}
	require.Fail(t, "a good history does not pass", explain(res))
}

func explain(res verify.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "verdict %s\n", res.Verdict)
	for _, f := range res.Findings {
		fmt.Fprintf(&b, "%s %s %s: %s\n  %s\n", f.Verdict, f.Invariant, f.Key, f.Text, strings.Join(f.Story, "\n  "))
	}
	return b.String()
}

// golden is a minimal bad history: exactly one checker finds something.
type golden struct {
	invariant string
	also      []string // what cannot but be broken with it
	name      string
	mode      [2]string
	verdict   verify.Verdict
	text      string // part of the finding
	build     func(w *world)
	edit      func(w *world) // after the end was read
}

var (
	sameKey = [2]string{"same-key", "deduplicating"}
	resend  = [2]string{"resend", "plain"}
	hold    = [2]string{"hold", "plain"}
)

func goldens() []golden {
	one := func(f func(m *mail)) func(w *world) {
		return func(w *world) { f(w.mail("b1")) }
	}
	delivered := one(func(m *mail) { m.delivered() })
	return []golden{
		// well-formed-history
		{
			invariant: "well-formed-history", name: "two operations open", mode: hold, verdict: verify.HarnessError, text: "was open",
			build: one(func(m *mail) {
				m.delivered()
				o := *m.op("confirm", history.OpOK)
				m.w.add(history.Record{T: o.Return, Kind: history.KindOp, Op: &o})
			}),
		},
		{
			invariant: "well-formed-history", name: "log ends early", mode: hold, verdict: verify.HarnessError, text: "the log ends at",
			build: delivered, edit: func(w *world) { w.dropChange("SENT") },
		},
		{
			invariant: "well-formed-history", name: "a page of the ledger is missing", mode: sameKey, verdict: verify.HarnessError, text: "none (or more than one) of number 2",
			build: func(w *world) {
				m := w.mail("b1").delivered()
				m.w.pass(time.Millisecond)
				m.try() // the copy that nobody would see
				w.mail("b2").delivered()
			}, edit: func(w *world) { w.dropAttempt(2) },
		},
		{
			invariant: "well-formed-history", name: "the last page of the ledger is missing", mode: sameKey, verdict: verify.HarnessError, text: "2 attempts were taken down, and the history holds 1",
			build: one(func(m *mail) { m.delivered().try() }), edit: func(w *world) {
				w.final.Counted = map[string]int64{history.CountedAttempts: 2}
				w.dropAttempt(2)
			},
		},
		{
			invariant: "well-formed-history", name: "an attempt twice", mode: hold, verdict: verify.HarnessError, text: "number 2",
			build: func(w *world) { w.mail("b1").delivered(); w.mail("b2").delivered().lastTry.ID = 1 },
		},
		{
			invariant: "well-formed-history", name: "the log was cut at a record", mode: hold, verdict: verify.HarnessError, text: "4 changes notify were taken down, and the history holds 3",
			build: delivered, edit: func(w *world) {
				w.final.Counted = map[string]int64{"changes notify": 4, "changes booking": 2, "letters of a newer harness": 7}
			},
		},
		{
			invariant: "well-formed-history", name: "a change is missing in the middle", mode: hold, verdict: verify.HarnessError, text: "the log of notify holds 2 changes, and none (or more than one) of order 2",
			build: delivered, edit: func(w *world) {
				w.records = slices.DeleteFunc(w.records, func(r history.Record) bool { return r.Change != nil && r.Change.New["status"] == "SENDING" })
			},
		},
		{
			invariant: "well-formed-history", name: "the clock was set forward", mode: hold, verdict: verify.HarnessError, text: "1h0m0s during the run",
			build: func(w *world) {
				w.mail("b1").delivered()
				w.process("notifyd-1", "ready")
				w.records[len(w.records)-1].Process.Wall = w.wall().Add(time.Hour)
			},
		},
		{
			invariant: "well-formed-history", name: "the clock was set back", mode: hold, verdict: verify.HarnessError, text: "jumped by -1m0s",
			build: func(w *world) {
				w.process("notifyd-1", "ready")
				w.mail("b1").delivered()
				w.process("notifyd-2", "ready")
				w.records[len(w.records)-1].Process.Wall = w.wall().Add(-time.Minute)
			},
		},
		{
			invariant: "well-formed-history", name: "a row was not read", mode: hold, verdict: verify.HarnessError, text: "none was read at the end",
			build: delivered, edit: func(w *world) { w.final.Rows = nil },
		},
		{
			invariant: "well-formed-history", name: "a record was refused", mode: hold, verdict: verify.HarnessError, text: "refused a record",
			build: func(w *world) {
				w.mail("b1").delivered()
				w.add(history.Record{T: w.now, Kind: history.KindRefused, Refused: &history.Refused{Kind: history.KindOp, Reason: "no key"}})
			},
		},
		{
			invariant: "well-formed-history", name: "unreadable line", mode: hold, verdict: verify.HarnessError, text: "line ",
			build: func(w *world) { w.mail("b1").delivered(); w.add(history.Record{T: 0, Kind: history.KindNote}) },
		},
		{
			invariant: "well-formed-history", name: "deadline is no duration", mode: hold, verdict: verify.HarnessError, text: "send_deadline",
			build: delivered, edit: func(w *world) { w.meta.Params[history.ParamSendDeadline] = "soon" },
		},
		{
			invariant: "well-formed-history", name: "staleness is no duration", mode: hold, verdict: verify.HarnessError, text: "stale_after",
			build: delivered, edit: func(w *world) { w.meta.Params[history.ParamStaleAfter] = "old" },
		},
		{
			invariant: "well-formed-history", name: "an invariant that does not exist", mode: hold, verdict: verify.HarnessError, text: "exactly-once",
			build: delivered, edit: func(w *world) { w.meta.Invariants = []string{"nothing-lost", "exactly-once"} },
		},
		// assurance
		{
			invariant: "assurance", name: "no traffic", mode: hold, verdict: verify.Invalid, text: "floor is 1",
			build: func(w *world) {}, edit: func(w *world) { w.final.Outbox, w.final.Topic = []history.OutboxLeft{}, []history.TopicRecord{} },
		},
		{
			invariant: "assurance", name: "no traffic and no floor", mode: hold, verdict: verify.Invalid, text: "no client made an operation",
			build: func(w *world) {}, edit: func(w *world) {
				w.meta.Floors = history.Floors{}
				w.final.Outbox, w.final.Topic = []history.OutboxLeft{}, []history.TopicRecord{}
			},
		},
		{
			invariant: "assurance", name: "fault without a witness", mode: hold, verdict: verify.Invalid, text: "nothing witnesses",
			build: func(w *world) { w.mail("b1").delivered(); w.fault("lose-250", "smtp server", 1).Witness = "" },
		},
		{
			invariant: "assurance", name: "fault that never struck", mode: hold, verdict: verify.Invalid, text: "struck 0 times",
			build: func(w *world) { w.mail("b1").delivered(); w.fault("lose-250", "smtp server", 1).Count = 0 },
		},
		{
			invariant: "assurance", name: "fault that may have struck", mode: hold, verdict: verify.Invalid, text: "not known whether",
			build: func(w *world) {
				w.mail("b1").delivered()
				w.fault("lose-250", "smtp server", 1).Outcome = history.Indeterminate
			},
		},
		{
			invariant: "assurance", name: "too few faults", mode: hold, verdict: verify.Invalid, text: "0 faults were installed",
			build: delivered, edit: func(w *world) { w.meta.Floors.Faults = 1 },
		},
		{
			invariant: "assurance", name: "planned fault without a record", mode: hold, verdict: verify.Invalid, text: "kill was planned",
			build: delivered, edit: func(w *world) { w.meta.Params[history.ParamFaults] = "kill" },
		},
		{
			invariant: "assurance", name: "no cancel was acknowledged", mode: hold, verdict: verify.Invalid, text: "no cancel",
			build: one(func(m *mail) { m.delivered().op("cancel", history.OpUnknown) }),
		},
		{
			invariant: "assurance", name: "arrivals missing", mode: hold, verdict: verify.Invalid, text: "1 of 2 scheduled",
			build: delivered, edit: func(w *world) { w.meta.Params[history.ParamArrivals] = "2" },
		},
		{
			invariant: "assurance", name: "ledger not empty at the start", mode: hold, verdict: verify.Invalid, text: "start was not empty",
			build: func(w *world) {
				m := w.mail("b1")
				m.try(refuse("451 later"))
				w.pass(time.Second)
				m.delivered()
			},
		},
		{
			invariant: "assurance", name: "table not empty at the start", mode: hold, verdict: verify.Invalid, text: "table was not empty",
			build: delivered, edit: func(w *world) { w.dropChange("PENDING") },
		},
		{
			invariant: "assurance", name: "evidence of a named invariant is missing", mode: hold, verdict: verify.Invalid, text: "could not be judged",
			build: delivered, edit: func(w *world) {
				w.meta.Invariants = []string{"nothing-lost", "relay-complete"}
				w.final.Topic = nil
			},
		},
		// nothing-lost
		{
			invariant: "nothing-lost", name: "no row anywhere", mode: resend, text: "no row of it exists", build: func(w *world) {
				w.mail("b0").delivered()
				w.mail("b1").op("confirm", history.OpOK)
			}, edit: func(w *world) { w.meta.Invariants = without("outbox-atomicity") },
		},
		{invariant: "nothing-lost", name: "event swallowed by the bridge", mode: resend, text: "holds no row", build: one(func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed()
		})},
		{invariant: "nothing-lost", name: "unknown to the client, then lost", mode: resend, text: "holds no row", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpUnknown)
			m.relayed()
		}},
		{invariant: "nothing-lost", name: "dead without a dead letter", mode: resend, text: "no message", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 5.1.1 no")).dead().letters = 0
		})},
		{invariant: "nothing-lost", name: "dead without an alert", mode: resend, text: "no alert", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 5.1.1 no")).dead().alerts = nil
		})},
		{invariant: "nothing-lost", name: "unknown without an alert", mode: hold, text: "no alert", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lostBeforeStored).unknown().alerts = nil
		})},
		{invariant: "nothing-lost", name: "expired without an alert", mode: hold, text: "no alert", build: one(func(m *mail) {
			m.confirmed().expired()
		})},
		{invariant: "nothing-lost", name: "cancelled before anybody asked for it", mode: hold, text: "before anybody", build: one(func(m *mail) {
			m.confirmed().settled("CANCELLED", nil).w.pass(time.Second)
			m.op("cancel", history.OpOK)
		})},
		{invariant: "nothing-lost", name: "expired before its time", mode: hold, text: "worth sending until", build: one(func(m *mail) {
			m.confirmed().settled("EXPIRED", map[string]string{"expires_at": m.pg(time.Hour)}).alerts = []string{"expired"}
		})},
		{invariant: "nothing-lost", name: "expired, and had no time", mode: hold, text: "nothing says", build: one(func(m *mail) {
			m.confirmed().settled("EXPIRED", nil).alerts = []string{"expired"}
		})},
		{invariant: "nothing-lost", name: "expired, and its time is none", mode: hold, text: "cannot be read", build: one(func(m *mail) {
			m.confirmed().settled("EXPIRED", map[string]string{"expires_at": "soon"}).alerts = []string{"expired"}
		})},
		{invariant: "nothing-lost", name: "a fresh event called too old", mode: hold, text: "is too old after", build: one(func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed().change(map[string]string{"status": "EXPIRED"})
			m.alerts = []string{"stale"}
		})},
		{invariant: "nothing-lost", name: "cancelled by nobody", mode: hold, text: "nobody cancelled", build: one(func(m *mail) {
			m.confirmed().settled("CANCELLED", nil)
		})},
		{invariant: "nothing-lost", name: "given up in the outbox, and a broker would take it", mode: hold, text: "no broker refuses", build: func(w *world) {
			lives("hold", "plain")["dead in the outbox"](w.mail("b1"))
			w.mails[0].outbox.Bytes = 700
		}},
		{invariant: "nothing-lost", name: "parked, and anybody can read it", mode: hold, text: "anybody can read it", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpOK)
			m.relayed().alerts = []string{"event-parked"}
		}},
		{invariant: "nothing-lost", name: "parked, and another's record was spoilt", mode: hold, text: "anybody can read it", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpOK)
			m.relayed().alerts = []string{"event-parked"}
			w.fault("spoil-records", "topic booking.events", time.Second).Keys = []string{"ticket:b0"}
		}},
		{invariant: "nothing-lost", name: "dead in the outbox, no alert", mode: hold, text: "outbox row is dead", build: func(w *world) {
			lives("hold", "plain")["dead in the outbox"](w.mail("b1"))
			w.mails[0].alerts = nil
		}},
		// at-most-one
		{invariant: "at-most-one", name: "held mail sent again", mode: hold, text: "2 copies", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).unclear().claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "at-most-one", name: "a key that changed on the way", mode: sameKey, text: "2 copies", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).unclear().claimed("notifyd-1.w1").try().sent()
		})},
		// no-needless-send
		{invariant: "no-needless-send", name: "hidden by the server's memory", mode: sameKey, text: "had been answered", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try().unclear().claimed("notifyd-1.w1").try(known).sent()
		})},
		{invariant: "no-needless-send", also: []string{"dot-within-lease"}, name: "sent, and sent again", mode: sameKey, text: "had been answered", build: one(func(m *mail) {
			m.delivered().w.pass(time.Second)
			m.try(known)
		})},
		{invariant: "no-needless-send", also: []string{"dot-within-lease"}, name: "killed after the mark was committed", mode: sameKey, text: "had been answered", build: one(func(m *mail) {
			m.delivered().w.process("notifyd-1", "killed")
			m.w.pass(simLease)
			m.client = "notifyd-2.w1"
			m.try(known)
		})},
		{invariant: "no-needless-send", name: "woken past its lease, no check before the dot", mode: sameKey, text: "attempt 1 was sent, although attempt 2", build: one(func(m *mail) {
			w := m.w
			m.confirmed().claimed("notifyd-1.w1").try(known)
			late := m.lastTry
			w.process("notifyd-1", "paused")
			w.pass(simLease)
			m.claimed("notifyd-2.w1").try().sent()
			w.process("notifyd-1", "resumed")
			w.step()
			late.DotAt, late.To = w.now, w.now+1000
		})},
		// no-phantom
		{invariant: "no-phantom", name: "nobody asked for it", mode: hold, text: "nobody asked", build: func(w *world) {
			w.mail("b0").delivered()
			w.mail("b1").arrives().claimed("notifyd-1.w1").try().sent()
		}},
		{invariant: "no-phantom", name: "its request failed", mode: hold, text: "definitely failed", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpFail)
			m.arrives().claimed("notifyd-1.w1").try().sent()
		}},
		// sent-is-true
		{invariant: "sent-is-true", name: "cancelled, and delivered", mode: hold, text: "cancelled, and the customer has 1", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try()
			m.op("cancel", history.OpOK)
			m.settled("CANCELLED", nil)
		})},
		{invariant: "sent-is-true", name: "dead, and delivered", mode: hold, text: "dead, and the customer has 1", build: one(func(m *mail) {
			m.confirmed()
			for range 2 {
				m.claimed("notifyd-1.w1").try(refuse("451 later")).failed()
			}
			m.claimed("notifyd-1.w1").try(lost250).dead()
		})},
		// unknown-justified
		{invariant: "unknown-justified", name: "refused, and called unknown", mode: hold, text: "every attempt was answered", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later")).unknown()
		})},
		{invariant: "unknown-justified", name: "accepted, and called unknown while others lost their answer", mode: hold, text: "every attempt was answered", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try().unknown()
			m.w.fault("lose-250", "smtp server", time.Second)
		})},
		{invariant: "unknown-justified", name: "given up too early", mode: resend, text: "policy resend tries again", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).unknown()
		})},
		// dead-justified
		{invariant: "dead-justified", name: "given up too early", mode: hold, text: "after 1 of 3", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later")).dead()
		})},
		{invariant: "dead-justified", name: "a limit of its own", mode: hold, text: "after 1 of 3", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later")).row["attempt_limit"] = "1"
			m.dead()
		})},
		{invariant: "dead-justified", name: "attempts that nobody saw", mode: hold, text: "saw only 1", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").failed().claimed("notifyd-1.w1").failed().claimed("notifyd-1.w1").try(refuse("451 later")).dead()
		})},
		{invariant: "dead-justified", name: "dead letter of a delivered mail", mode: hold, text: "dead-letter queue holds", build: one(func(m *mail) {
			m.delivered().letters = 1
		})},
		{invariant: "dead-justified", name: "alert of a mail that lives", mode: hold, text: "never was", build: one(func(m *mail) {
			m.delivered().alerts = []string{"mail-dead"}
		})},
		{invariant: "dead-justified", name: "alerted twice", mode: hold, text: "2 alerts for 1 deaths", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 no")).dead().alerts = []string{"mail-dead", "mail-dead"}
		})},
		// quiesced
		{invariant: "nothing-lost", name: "stalled", mode: hold, text: "stalled for", build: one(func(m *mail) {
			m.delivered()
			m.w.mail("b2").confirmed()
			m.w.pass(time.Minute)
		})},
		{invariant: "quiesced", name: "delivered and stalled", mode: hold, text: "stalled for", build: one(func(m *mail) {
			m.delivered()
			m.w.mail("b2").confirmed().claimed("notifyd-1.w1").try()
			m.w.pass(time.Minute)
		})},
		{invariant: "quiesced", name: "still moving", mode: hold, verdict: verify.Unknown, text: "still moving", build: one(func(m *mail) {
			m.delivered()
			m.w.mail("b2").confirmed()
		})},
		{invariant: "quiesced", name: "backlog is drained", mode: hold, verdict: verify.Unknown, text: "while others come to rest", build: one(func(m *mail) {
			m.confirmed()
			m.w.pass(time.Minute)
			m.w.mail("b2").delivered()
		})},
		{invariant: "nothing-lost", name: "a mail that loops does not count as draining", mode: hold, text: "stalled for", build: func(w *world) {
			w.mail("b0").delivered()
			w.mail("b1").confirmed()
			w.pass(time.Minute)
		}},
		// retry-discipline
		{invariant: "retry-discipline", name: "tried again at once", mode: hold, text: "the delay is 200ms", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later"))
			m.settled("FAILED", map[string]string{"unsettled": "0"}).claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "retry-discipline", name: "claimed before it was due", mode: hold, text: "before it was due", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later"))
			m.settled("FAILED", map[string]string{"unsettled": "0", "next_attempt_at": m.pg(time.Minute)})
			m.w.pass(time.Second)
			m.claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "retry-discipline", name: "put off for far longer than its delay", mode: hold, text: "put off for 1m0.", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later"))
			m.settled("FAILED", map[string]string{"unsettled": "0", "next_attempt_at": m.pg(time.Minute + 2*time.Millisecond)})
			m.w.pass(time.Minute + 5*time.Millisecond)
			m.claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "retry-discipline", name: "tried after a permanent refusal", mode: hold, text: "refused for good", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 no")).failed().claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "retry-discipline", name: "tried too often", mode: hold, text: "attempt 4, 3 are allowed", build: one(func(m *mail) {
			m.confirmed()
			for range 3 {
				m.claimed("notifyd-1.w1").try(refuse("451 later")).failed()
			}
			m.claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "throttle-is-honoured", name: "tried again before it was asked to", mode: sameKey, text: "and to wait for 2s", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(2 * time.Second)).spared(simDelays[0]).w.pass(time.Second)
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "throttle-is-honoured", name: "a refusal of the mail names a time, and is not heeded", mode: sameKey, text: "and to wait for 2s", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(2*time.Second), func(a *history.Attempt) { a.Reply = "503 service_unavailable" }).failed()
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "throttle-is-honoured", name: "the client goes on with other mails", mode: sameKey, text: "notifyd-1.w1 was told by attempt 1 to wait for 4s", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(4 * time.Second)).spared(4 * time.Second).w.pass(2 * time.Second)
			m.w.mail("b2").confirmed().claimed("notifyd-1.w1").try(overHTTP).sent().w.pass(2 * time.Second)
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "throttle-is-honoured", name: "a throttle costs a try", mode: sameKey, text: "0 before the claim, 1 after it", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(100 * time.Millisecond)).failed()
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "throttle-is-honoured", name: "put off for an hour", mode: sameKey, text: "asked to wait for 100ms, and the mail is put off for 1h0m0", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(100 * time.Millisecond)).spared(time.Hour).w.pass(time.Hour)
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "throttle-is-honoured", name: "dead of throttles", mode: sameKey, text: "2 before the claim, 3 after it, DEAD", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later")).failed().claimed("notifyd-1.w1").try(refuse("451 later")).failed()
			m.claimed("notifyd-1.w1").try(throttle(100 * time.Millisecond)).dead()
		})},
		// single-flight
		{invariant: "single-flight", name: "lease of another ignored", mode: sameKey, text: "lease of token 1 lived", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250)
			m.w.pass(time.Second)
			m.claimed("notifyd-2.w1").try(known).sent()
		})},
		{invariant: "single-flight", name: "token skipped", mode: hold, text: "token 5 after 0", build: one(func(m *mail) {
			m.confirmed().change(map[string]string{"status": "SENDING", "token": "5", "attempts": "1", "unsettled": "1", "locked_until": m.pg(simLease)})
			m.try().sent()
		})},
		{invariant: "single-flight", name: "token moved without a claim", mode: hold, text: "without a claim", build: one(func(m *mail) {
			m.delivered().change(map[string]string{"token": "0"})
		})},
		{invariant: "single-flight", name: "claimed and settled in one transaction", mode: hold, text: "in one transaction", build: delivered, edit: func(w *world) {
			for _, r := range w.records {
				if r.Change != nil && r.Change.New["status"] == "SENT" {
					r.Change.XID--
				}
			}
		}},
		// dot-within-lease
		{invariant: "dot-within-lease", name: "woken past its lease", mode: resend, text: "after its lease was over (token 1", build: one(func(m *mail) {
			wokenLate(m, simLease+2*time.Second)
		})},
		{invariant: "dot-within-lease", name: "sent, then claimed", mode: hold, text: "before any claim", build: one(func(m *mail) {
			m.confirmed().try()
			m.w.pass(time.Second)
			m.claimed("notifyd-1.w1").sent()
		})},
		{invariant: "dot-within-lease", name: "found to be sent, and sent once more without a claim", mode: resend, text: "after its row had become UNKNOWN", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).settled("UNKNOWN", nil).settled("SENT", nil)
			m.w.pass(2 * time.Second)
			m.try()
		})},
		// terminal-is-final
		{invariant: "terminal-is-final", name: "cancelled, then pending again", mode: hold, text: "CANCELLED is final", build: one(func(m *mail) {
			m.confirmed().cancelled().change(map[string]string{"status": "PENDING", "cancel_requested": "false"})
			m.claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "terminal-is-final", name: "replay undoes a cancel", mode: hold, text: "cancel was asked for", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 no")).dead()
			m.op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.change(map[string]string{"status": "PENDING"})
			m.letters = 0
			m.settled("CANCELLED", nil)
		})},
		{invariant: "terminal-is-final", name: "unfinished row deleted", mode: hold, text: "deleted while it was PENDING", build: one(func(m *mail) {
			m.delivered()
			m.row["status"] = "PENDING"
			m.change(map[string]string{"status": "SENT"})
			b := m.w.mail("b2").confirmed()
			b.op("cancel", history.OpOK)
			b.deleted()
		})},
		// legal-transitions
		{invariant: "legal-transitions", name: "sent without a claim, back to pending", mode: hold, text: "SENDING → PENDING", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").settled("PENDING", nil).claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "legal-transitions", also: []string{"dot-within-lease"}, name: "born dead", mode: hold, text: "(no row) → SENT", build: one(func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed().change(map[string]string{"status": "SENT"})
			m.try()
		})},
		// cancel-is-honoured
		{invariant: "cancel-is-honoured", name: "the retry ignores the flag", mode: hold, text: "it will be tried again", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later"))
			m.op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.failed().settled("CANCELLED", nil)
		})},
		{invariant: "cancel-is-honoured", name: "the claim ignores the flag", mode: hold, text: "although its cancel had been committed", build: one(func(m *mail) {
			m.confirmed().op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.claimed("notifyd-1.w1").try().sent()
		})},
		{invariant: "cancel-is-honoured", name: "an acknowledged cancel that never came", mode: hold, text: "knows nothing of it", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 no")).dead()
			m.op("cancel", history.OpOK)
		})},
		// one-row-per-key
		{invariant: "one-row-per-key", name: "two rows for one event", mode: hold, text: "2 rows", build: one(func(m *mail) {
			m.delivered()
			m.row = nil
			m.op("cancel", history.OpOK)
			m.change(map[string]string{"id": "id-other", "status": "CANCELLED"})
		}), edit: func(w *world) { w.final.Rows[0].State = "sent" }},
		// key-discipline
		{invariant: "key-discipline", name: "no Message-ID", mode: hold, text: "carries no Message-ID", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.MessageID = "" }).sent()
		})},
		{invariant: "key-discipline", name: "Message-ID made anew", mode: hold, text: "has Message-ID", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuseAfterDot("451 later")).failed()
			m.claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.MessageID = "<other@mailproof.test>" }).sent()
		})},
		{invariant: "key-discipline", name: "an API's id that changed", mode: hold, text: "has Message-ID", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuseAfterDot("500 oops"), overHTTP, func(a *history.Attempt) { a.MessageID = "<first@mailproof.test>" }).failed()
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		})},
		{invariant: "key-discipline", name: "bytes changed", mode: hold, text: "bytes of attempt 2 differ", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuseAfterDot("451 later")).failed()
			m.claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.BodyHash = "other" }).sent()
		})},
		{invariant: "key-discipline", name: "no key in the mail", mode: hold, text: "carries no dedupe key", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Key = "" }).sent()
		})},
		{invariant: "key-discipline", name: "two mails, one Message-ID", mode: hold, text: "is also that of", build: func(w *world) {
			w.mail("b1").delivered()
			w.mail("b2").confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.MessageID = "<b1@mailproof.test>" }).sent()
		}},
		{invariant: "key-discipline", name: "two bookings, one key", mode: hold, text: "share one key", build: one(func(m *mail) {
			m.delivered().op("confirm", history.OpOK).Booking = "b2"
		})},
		// content-and-recipient
		{invariant: "content-and-recipient", name: "sent to another customer", mode: hold, text: "the customer is", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Recipient = "eve@customers.test" }).sent()
		})},
		{
			invariant: "content-and-recipient", name: "row of another booking", mode: hold, text: "names booking b9",
			build: delivered, edit: func(w *world) { w.final.Rows[0].Booking = "b9" },
		},
		{invariant: "content-and-recipient", name: "another booking's ticket", mode: hold, text: "the mail is another's", build: func(w *world) {
			w.mail("b1").delivered()
			w.mail("b2").confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Subject = "Your ticket for Final of b1 is confirmed" }).sent()
		}},
		{invariant: "content-and-recipient", name: "another reader's offer", mode: hold, text: "should name c2@customers.test", build: func(w *world) {
			w.mail("b0").delivered()
			all := w.campaign("spring", history.OpOK, "c1", "c2")
			all[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
			all[1].arrives().claimed("notifyd-1.marketing-1").try(func(a *history.Attempt) { a.Subject = "For c1@customers.test" }).sent()
		}},
		// outbox-atomicity
		{
			invariant: "outbox-atomicity", name: "the orders' log is missing", mode: hold, verdict: verify.Invalid, text: "no changes of public.bookings were recorded",
			build: delivered, edit: func(w *world) {
				w.records = slices.DeleteFunc(w.records, func(r history.Record) bool { return r.Change != nil && r.Change.Database == "booking" })
			},
		},
		{invariant: "outbox-atomicity", name: "acknowledged without an outbox row", mode: hold, text: "holds no row", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpOK)
			m.arrives().claimed("notifyd-1.w1").try().sent()
		}},
		{invariant: "outbox-atomicity", name: "failed, and an outbox row", mode: hold, text: "definitely failed", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.mail("b1")
			m.op("confirm", history.OpFail)
			m.relayed().arrives().cancelledSilently()
		}},
		{invariant: "outbox-atomicity", name: "two transactions", mode: hold, text: "which wrote no outbox row", build: delivered, edit: func(w *world) {
			for _, r := range w.records {
				if r.Change != nil && r.Change.Table == "public.outbox" {
					r.Change.XID++
				}
			}
		}},
		// relay-complete
		{
			invariant: "relay-complete", name: "marked, and not in the topic", mode: hold, text: "marked published", build: one(func(m *mail) {
				m.delivered().topic = 0
			}), edit: func(w *world) { w.final.Topic = []history.TopicRecord{} },
		},
		{invariant: "relay-complete", name: "never published", mode: hold, text: "never published", build: one(func(m *mail) {
			m.delivered()
			m.topic, m.outbox.Published = 0, false
		}), edit: func(w *world) { w.final.Topic = []history.TopicRecord{} }},
		{invariant: "relay-complete", name: "a later event overtook", mode: hold, text: "overtook", build: one(func(m *mail) {
			m.delivered()
		}), edit: func(w *world) {
			later := w.final.Outbox[0]
			later.EventID = "event-cancel"
			w.final.Outbox = append(w.final.Outbox, later)
			w.final.Topic[0].Offset = 1
			w.final.Topic = append(w.final.Topic, history.TopicRecord{Offset: 0, EventID: "event-cancel", Key: later.Key})
		}},
		// campaigns
		{invariant: "nothing-lost", name: "mail of an accepted campaign without a row", mode: resend, text: "campaign was accepted, and", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1", "c2")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
		}},
		{invariant: "nothing-lost", name: "mail of an accepted campaign without a row, and a stop that hides it", mode: resend, text: "campaign was accepted, and", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1", "c2")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
			w.stop("spring", history.OpOK)
		}},
		{invariant: "nothing-lost", name: "expired campaign without an alert", mode: resend, text: "EXPIRED, and no alert", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1")[0].arrives().expired()
		}},
		{invariant: "nothing-lost", name: "campaign mail cancelled, and nobody stopped it", mode: resend, text: "nobody cancelled", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1")[0].arrives().cancelledSilently()
			w.campaign("winter", history.OpOK, "c2")[0].arrives().cancelledSilently()
			w.stop("winter", history.OpOK)
		}},
		{invariant: "at-most-one", name: "campaign mail twice, held by its policy", mode: resend, text: "under policy hold", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1")[0].arrives().claimed("notifyd-1.marketing-1").try(lost250).unclear().claimed("notifyd-1.marketing-1").try().sent()
		}},
		{invariant: "no-phantom", name: "campaign that definitely was not taken", mode: resend, text: "request definitely failed", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("winter", history.OpOK, "c0")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
			w.campaign("spring", history.OpFail, "c1")[0].arrives().claimed("notifyd-1.marketing-1").try().sent()
		}},
		{invariant: "sent-is-true", name: "stopped, and delivered", mode: resend, text: "cancelled, and the customer has 1", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.campaign("spring", history.OpOK, "c1")[0].arrives().claimed("notifyd-1.marketing-1").try()
			w.stop("spring", history.OpOK)
			m.cancelledSilently()
		}},
		{invariant: "stop-is-honoured", name: "claimed after the stop", mode: resend, text: "after the stop of campaign spring", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.campaign("spring", history.OpOK, "c1")[0].arrives()
			w.stop("spring", history.OpOK)
			w.pass(2 * time.Second)
			m.claimed("notifyd-1.marketing-1").try().sent()
		}},
		{invariant: "expiry-is-honoured", name: "claimed after its time was over", mode: resend, text: "claimed 2.", build: func(w *world) {
			w.mail("b0").delivered()
			m := w.campaign("spring", history.OpOK, "c1")[0]
			m.change(map[string]string{"status": "PENDING", "expires_at": m.pg(time.Second)})
			w.pass(3 * time.Second)
			m.claimed("notifyd-1.marketing-1").try().sent()
		}},
		{invariant: "quiesced", name: "campaign that stands still", mode: resend, text: "stalled for", build: func(w *world) {
			w.mail("b0").delivered()
			w.campaign("spring", history.OpOK, "c1")[0].arrives().claimed("notifyd-1.marketing-1").try()
			w.pass(time.Minute)
		}},
		// queue-conservation
		{
			invariant: "queue-conservation", name: "stuck in the dead-letter worker", mode: hold, text: "1 messages, 0 ready",
			build: delivered, edit: func(w *world) { w.final.Queues[1].Messages = 1 },
		},
		{
			invariant: "queue-conservation", name: "a dead letter that cannot be read", mode: hold, text: "0 could be read",
			build: delivered, edit: func(w *world) { w.final.Queues[2].Messages = 1 },
		},
		// quorum-queues
		{
			invariant: "quorum-queues", name: "a classic queue", mode: hold, text: "not a quorum queue",
			build: delivered, edit: func(w *world) { w.final.Queues[0].Type = "classic" },
		},
		{
			invariant: "quorum-queues", name: "one member", mode: hold, text: "has 1 members",
			build: delivered, edit: func(w *world) { w.final.Queues[0].Members = 1 },
		},
		{
			invariant: "quorum-queues", name: "no leader", mode: hold, text: "has no leader",
			build: delivered, edit: func(w *world) { w.final.Queues[2].Leader = "" },
		},
		// sweeper-explained
		{
			invariant: "sweeper-explained", name: "a rescue without a fault", mode: hold, text: "counts 2",
			build: delivered, edit: func(w *world) { w.final.Counters[`sweeper_rescues_total{cause="lease"}`] = 2 },
		},
		{
			invariant: "sweeper-explained", name: "a rescue and a fault that explains none", mode: hold, text: "counts 2",
			build: func(w *world) { w.mail("b1").delivered(); w.fault("lose-250", "smtp server", 1) },
			edit:  func(w *world) { w.final.Counters[`sweeper_rescues_total{cause="lease"}`] = 2 },
		},
		{
			invariant: "sweeper-explained", name: "a rescue, and trouble that nobody planned", mode: hold, verdict: verify.Invalid, text: "waited for one",
			build: delivered, edit: func(w *world) {
				w.final.Counters[`sweeper_rescues_total{cause="overdue"}`] = 1
				w.final.Counters[`notifyd_dependency_waits_total{duty="publish"}`] = 3
			},
		},
		// provider-breach
		{invariant: "provider-breach", name: "accepted and thrown away", mode: hold, verdict: verify.Pass, text: "lost by the receiver", build: func(w *world) {
			w.mail("b0").delivered()
			lives("hold", "plain")["thrown away by the server"](w.mail("b1"))
		}},
		{invariant: "provider-breach", name: "refused and kept", mode: hold, verdict: verify.Pass, text: "doubled by the receiver", build: one(func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Reply, a.Breach = "451 4.3.0 later", true }).failed()
			m.claimed("notifyd-1.w1").try().sent()
		})},
	}
}

func without(name string) []string {
	return slices.DeleteFunc(verify.Names(), func(n string) bool { return n == name })
}

// dropChange removes the log's change to a status, as if it had never been
// counted.
func (w *world) dropChange(status string) {
	w.records = slices.DeleteFunc(w.records, func(r history.Record) bool {
		return r.Change != nil && r.Change.New["status"] == status
	})
	orders := map[string]int64{}
	for _, r := range w.records {
		if r.Change != nil {
			orders[r.Change.Database]++
			r.Change.Order = orders[r.Change.Database]
		}
	}
}

// dropAttempt removes a page of the ledger.
func (w *world) dropAttempt(ids ...int64) {
	w.records = slices.DeleteFunc(w.records, func(r history.Record) bool {
		return r.Attempt != nil && slices.Contains(ids, r.Attempt.ID)
	})
}

func (m *mail) deleted() {
	w := m.w
	w.step()
	order := w.next("notify")
	w.add(history.Record{T: w.now, Kind: history.KindChange, Change: &history.Change{
		Database: "notify", Table: "public.notifications", Op: "DELETE", XID: uint64(order), Order: order, CommitAt: w.wall(), Old: m.row,
	}})
	m.row = nil
}

func (m *mail) cancelledSilently() { m.settled("CANCELLED", nil) }

// No golden history can break at-most-one alone under resend: a copy without an
// excuse is a needless send too. So it is seen beside that one.
func TestCopyWithoutExcuseIsFoundUnderResend(t *testing.T) {
	t.Parallel()
	w := newWorld(resend[0], resend[1])
	m := w.mail("b1").delivered()
	w.pass(time.Second)
	m.try()
	res := w.rest().judge()
	require.Equal(t, verify.Fail, res.Verdict)
	var texts []string
	for _, f := range res.Findings {
		if f.Invariant == "at-most-one" {
			texts = append(texts, f.Text)
		}
	}
	require.Len(t, texts, 1, explain(res))
	require.Contains(t, texts[0], "copy 2 of 2 (attempt 2) has no excuse")
}

func TestBadHistoriesAreFound(t *testing.T) {
	t.Parallel()
	for _, g := range goldens() {
		t.Run(g.invariant+"/"+g.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(g.mode[0], g.mode[1])
			g.build(w)
			w.rest()
			if g.edit != nil {
				g.edit(w)
			}
			res := w.judge()
			found := map[string]bool{}
			for _, f := range res.Findings {
				found[f.Invariant] = true
			}
			want := map[string]bool{g.invariant: true}
			for _, name := range g.also {
				want[name] = true
			}
			require.Equal(t, want, found, explain(res))
			i := slices.IndexFunc(res.Findings, func(f verify.Finding) bool { return f.Invariant == g.invariant })
			require.Contains(t, res.Findings[i].Text, g.text)
			verdict := cmp.Or(g.verdict, verify.Fail)
			require.Equal(t, verdict, res.Verdict, explain(res))
			require.Equal(t, verdict, res.Findings[0].Verdict)
			if k := res.Findings[0].Key; k != "" && verdict != verify.HarnessError {
				require.NotEmpty(t, res.Findings[0].Story)
			}
		})
	}
}

func TestEveryCheckerHasABadHistory(t *testing.T) {
	t.Parallel()
	covered := map[string]bool{}
	for _, g := range goldens() {
		covered[g.invariant] = true
	}
	for _, name := range verify.Names() {
		require.True(t, covered[name], name)
	}
}
