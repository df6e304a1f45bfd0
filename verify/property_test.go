package verify_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/history"
	"mailproof/verify"
)

// drawWorld is a run of well-behaved mails, some of them struck by faults.
func drawWorld(t *rapid.T) *world {
	mode := rapid.SampledFrom(modes).Draw(t, "policy and server")
	w := newWorld(mode[0], mode[1])
	named := lives(mode[0], mode[1])
	if rapid.Bool().Draw(t, "processes struck") {
		maps.Copy(named, struckLives(mode[0], mode[1]))
	}
	names := slices.Sorted(maps.Keys(named))
	w.mail("always").delivered()
	for i := range rapid.IntRange(0, 12).Draw(t, "mails") {
		named[rapid.SampledFrom(names).Draw(t, "life")](w.mail(simName(i)))
		w.pass(time.Duration(rapid.IntRange(0, 3000).Draw(t, "pause ms")) * time.Millisecond)
	}
	if rapid.Bool().Draw(t, "campaign") {
		drawCampaign(t, w)
	}
	return w.rest()
}

// drawCampaign adds a campaign whose mails live as they may. One that is stopped
// is not claimed again, so the stop is the end.
func drawCampaign(t *rapid.T, w *world) {
	campaign := campaignLives()
	delete(campaign, "stopped while it was sent")
	delete(campaign, "stopped before the claim")
	names := slices.Sorted(maps.Keys(campaign))
	mails := w.campaign("spring", history.OpOK, "c1", "c2", "c3")
	for _, m := range mails[1:] {
		campaign[rapid.SampledFrom(names).Draw(t, "campaign life")](m)
	}
	campaignLives()[rapid.SampledFrom([]string{"delivered", "stopped while it was sent", "stopped before the claim"}).Draw(t, "end")](mails[0])
}

func TestWellBehavedRunsPass(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) { requirePass(t, drawWorld(t).judge()) })
}

// mutation is one lie in the evidence of a good run: what it would look like
// if the system had done one thing wrong.
type mutation struct {
	// sites are the records that it can change; apply changes one.
	sites func(w *world) []int
	apply func(w *world, site int)
	// found names the checkers of which one at least must find it.
	found []string
}

func attemptsWhere(ok func(a *history.Attempt, m *mail) bool) func(w *world) []int {
	return func(w *world) (sites []int) {
		for i, r := range w.records {
			if r.Attempt == nil {
				continue
			}
			for _, m := range w.mails {
				if m.booking+"@customers.test" == r.Attempt.Recipient && ok(r.Attempt, m) {
					sites = append(sites, i)
				}
			}
		}
		return sites
	}
}

// onlyCopy is the one copy of a mail that is SENT.
func onlyCopy(w *world) []int {
	return attemptsWhere(func(a *history.Attempt, m *mail) bool {
		copies := 0
		for _, r := range w.records {
			if r.Attempt != nil && r.Attempt.Key == m.key && r.Attempt.Stored {
				copies++
			}
		}
		return a.Stored && copies == 1 && m.row["status"] == "SENT"
	})(w)
}

func changesWhere(ok func(c *history.Change) bool) func(w *world) []int {
	return func(w *world) (sites []int) {
		for i, r := range w.records {
			if r.Change != nil && r.Change.Table == "public.notifications" && ok(r.Change) {
				sites = append(sites, i)
			}
		}
		return sites
	}
}

func finalRows(state string) func(w *world) []int {
	return func(w *world) (sites []int) {
		for i, r := range w.final.Rows {
			if r.State == state {
				sites = append(sites, i)
			}
		}
		return sites
	}
}

// needsItsAlert reports a mail that only its alert makes visible: not delivered,
// not cancelled.
func needsItsAlert(w *world, key string) bool {
	if slices.ContainsFunc(w.records, func(r history.Record) bool { return r.Attempt != nil && r.Attempt.Key == key && r.Attempt.Stored }) {
		return false
	}
	return !slices.ContainsFunc(w.final.Rows, func(r history.MailState) bool { return r.Key == key && (r.State == "cancelled" || r.State == "sent") })
}

func mutations() map[string]mutation {
	return map[string]mutation{
		"the copy was never stored": {
			onlyCopy,
			func(w *world, i int) { w.records[i].Attempt.Stored = false },
			[]string{"nothing-lost"},
		},
		"a copy was sent once more after it was settled": {
			onlyCopy,
			func(w *world, i int) {
				again := *w.records[i].Attempt
				w.attempts++
				again.ID = w.attempts
				again.From, again.DotAt, again.To = w.now+1, w.now+2, w.now+3
				w.add(history.Record{T: again.To, Kind: history.KindAttempt, Attempt: &again})
				w.pass(time.Second)
			},
			[]string{"at-most-one", "no-needless-send"},
		},
		"the mail went to somebody else": {
			attemptsWhere(func(a *history.Attempt, m *mail) bool { return a.Key != "" && len(m.row) > 0 }),
			func(w *world, i int) { w.records[i].Attempt.Recipient = "eve@customers.test" },
			[]string{"content-and-recipient"},
		},
		"the mail carries no key": {
			onlyCopy,
			func(w *world, i int) { w.records[i].Attempt.Key = "" },
			[]string{"key-discipline"},
		},
		"an alert was not raised": {
			func(w *world) (sites []int) {
				for i, a := range w.final.Alerts {
					if needsItsAlert(w, a.Key) {
						sites = append(sites, i)
					}
				}
				return sites
			},
			func(w *world, i int) { w.final.Alerts = slices.Delete(w.final.Alerts, i, i+1) },
			[]string{"nothing-lost"},
		},
		"a dead letter is missing": {
			func(w *world) (sites []int) {
				for i, letter := range w.final.DLQ {
					if needsItsAlert(w, letter.Key) {
						sites = append(sites, i)
					}
				}
				return sites
			},
			func(w *world, i int) {
				w.final.DLQ = slices.Delete(w.final.DLQ, i, i+1)
				w.final.Queues[2].Messages--
			},
			[]string{"nothing-lost"},
		},
		"a dead letter too many": {
			finalRows("sent"),
			func(w *world, i int) {
				w.final.DLQ = append(w.final.DLQ, history.DeadLetter{Key: w.final.Rows[i].Key})
				w.final.Queues[2].Messages++
			},
			[]string{"dead-justified"},
		},
		"a mail was left behind in the outbox": {
			func(w *world) (sites []int) {
				for i, o := range w.final.Outbox {
					if o.Published {
						sites = append(sites, i)
					}
				}
				return sites
			},
			func(w *world, i int) {
				id := w.final.Outbox[i].EventID
				w.final.Outbox[i].Published = false
				w.final.Topic = slices.DeleteFunc(w.final.Topic, func(r history.TopicRecord) bool { return r.EventID == id })
				if len(w.final.Topic) == 0 {
					w.final.Topic = []history.TopicRecord{}
				}
			},
			[]string{"relay-complete"},
		},
		"a claim raised the token by two": {
			changesWhere(func(c *history.Change) bool { return c.New["status"] == "SENDING" }),
			func(w *world, i int) { w.records[i].Change.New["token"] += "1" },
			[]string{"single-flight"},
		},
		"a claim came before the row was due": {
			changesWhere(func(c *history.Change) bool { return c.New["status"] == "FAILED" }),
			func(w *world, i int) {
				w.records[i].Change.New["next_attempt_at"] = w.wall().Add(time.Hour).Format("2006-01-02 15:04:05-07")
			},
			[]string{"retry-discipline"},
		},
		"a row was given up as if dead": {
			finalRows("expired"),
			func(w *world, i int) {
				w.final.Rows[i].State = "dead"
				for _, r := range w.records {
					if r.Change != nil && r.Change.New["status"] == "EXPIRED" && r.Change.New["dedupe_key"] == w.final.Rows[i].Key {
						r.Change.New["status"] = "DEAD"
					}
				}
			},
			[]string{"dead-justified", "legal-transitions"},
		},
		"a client's confirmation was never made durable": {
			func(w *world) (sites []int) {
				for i, r := range w.records {
					if r.Op != nil && r.Op.Name == "confirm" && r.Op.Outcome == history.OpUnknown {
						sites = append(sites, i)
					}
				}
				return sites
			},
			func(w *world, i int) {
				w.records[i].Op.Outcome = history.OpOK
				key := w.records[i].Op.Key
				w.final.Outbox = slices.DeleteFunc(w.final.Outbox, func(o history.OutboxLeft) bool { return o.Key == key })
			},
			[]string{"outbox-atomicity"},
		},
		"the sweeper moved rows without a cause": {
			func(w *world) []int {
				if slices.ContainsFunc(w.records, func(r history.Record) bool { return r.Process != nil || r.Fault != nil }) {
					return nil
				}
				return []int{0}
			},
			func(w *world, _ int) { w.final.Counters["sweeper_rescues_total"] = 1 },
			[]string{"sweeper-explained"},
		},
		"a fault lost its witness": {
			func(w *world) []int {
				w.fault("lose-250", "smtp server", time.Second)
				return []int{len(w.records) - 1}
			},
			func(w *world, i int) { w.records[i].Fault.Witness = "" },
			[]string{"assurance"},
		},
		"the log lost a change": {
			changesWhere(func(c *history.Change) bool { return c.New["status"] == "SENT" }),
			func(w *world, i int) { w.records = slices.Delete(w.records, i, i+1) },
			[]string{"well-formed-history"},
		},
	}
}

// Each lie turns a good run red, by the checker that it concerns.
func TestOneLieIsFound(t *testing.T) {
	t.Parallel()
	for name, m := range mutations() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			applied := 0
			rapid.Check(t, func(t *rapid.T) {
				w := drawWorld(t)
				sites := m.sites(w)
				if len(sites) == 0 {
					t.SkipNow()
				}
				m.apply(w, rapid.SampledFrom(sites).Draw(t, "site"))
				applied++
				res := w.judge()
				require.NotEqual(t, verify.Pass, res.Verdict)
				require.True(t, slices.ContainsFunc(res.Findings, func(f verify.Finding) bool { return slices.Contains(m.found, f.Invariant) }),
					explain(res))
			})
			require.Positive(t, applied)
		})
	}
}

// What the recorder wrote is judged the same a year later.
func TestCheckDirJudgesAgain(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := drawWorld(rt)
		if rapid.Bool().Draw(rt, "bad") {
			w.final.Queues[0].Type = "classic"
		}
		dir := t.TempDir()
		r, err := history.Create(filepath.Join(dir, history.FileName))
		require.NoError(rt, err)
		for _, rec := range w.all() {
			require.NoError(rt, r.Record(rec))
		}
		require.NoError(rt, r.Close())
		again, err := verify.CheckDir(dir)
		require.NoError(rt, err)
		want, err := json.Marshal(w.judge())
		require.NoError(rt, err)
		got, err := json.Marshal(again)
		require.NoError(rt, err)
		require.JSONEq(rt, string(want), string(got))
	})
}

func TestCheckDirNamesWhatItCannotRead(t *testing.T) {
	t.Parallel()
	_, err := verify.CheckDir(t.TempDir())
	require.ErrorContains(t, err, "history.jsonl")
}

// bigWorld is n mails, a third of them struck by a lost answer.
func bigWorld(n int) *world {
	w := newWorld("resend", "plain")
	named := lives("resend", "plain")
	for i := range n {
		m := w.mail(simName(i))
		if i%3 == 0 {
			named["answer lost, sent again"](m)
			continue
		}
		m.delivered()
	}
	for range 20 {
		w.process("notifyd-1", "killed")
		w.process("notifyd-1", "started")
	}
	return w.rest()
}

func BenchmarkJudge50k(b *testing.B) {
	h := bigWorld(50_000).history()
	for b.Loop() {
		if res := verify.Judge(h); res.Verdict != verify.Pass {
			b.Fatal(explain(res))
		}
	}
	b.ReportMetric(float64(50_000*b.N)/b.Elapsed().Seconds(), "mails/s")
}

func BenchmarkLoad50k(b *testing.B) {
	path := filepath.Join(b.TempDir(), history.FileName)
	r, err := history.Create(path)
	require.NoError(b, err)
	for _, rec := range bigWorld(50_000).all() {
		require.NoError(b, r.Record(rec))
	}
	require.NoError(b, r.Close())
	for b.Loop() {
		h, err := history.Load(path)
		require.NoError(b, err)
		require.Empty(b, h.Problems)
	}
}

// Whatever a file holds, it is judged or refused, never a panic; and one with an
// unreadable line never passes.
func TestAnyHistoryIsJudged(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var lines []any
		for _, rec := range drawWorld(t).all() {
			var line any
			text, err := json.Marshal(rec)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &line))
			lines = append(lines, line)
		}
		for range rapid.IntRange(1, 6).Draw(t, "edits") {
			i := rapid.IntRange(0, len(lines)-1).Draw(t, "line")
			switch rapid.IntRange(0, 3).Draw(t, "edit") {
			case 0:
				lines[i] = nil // "null" is a line without a kind
			case 1:
				lines = append(lines, lines[i])
			default:
				lines[i] = spoil(t, lines[i])
			}
		}
		var file bytes.Buffer
		enc := json.NewEncoder(&file)
		for _, line := range lines {
			require.NoError(t, enc.Encode(line))
		}
		h, err := history.Read(&file)
		require.NoError(t, err)
		res := verify.Judge(h)
		if len(h.Problems) > 0 {
			require.NotEqual(t, verify.Pass, res.Verdict)
		}
	})
}

// spoil replaces one value somewhere inside.
func spoil(t *rapid.T, v any) any {
	switch v := v.(type) {
	case map[string]any:
		if len(v) == 0 {
			return v
		}
		key := rapid.SampledFrom(slices.Sorted(maps.Keys(v))).Draw(t, "member")
		if rapid.IntRange(0, 4).Draw(t, "drop") == 0 {
			delete(v, key)
		} else {
			v[key] = spoil(t, v[key])
		}
		return v
	case []any:
		if len(v) == 0 {
			return v
		}
		i := rapid.IntRange(0, len(v)-1).Draw(t, "element")
		v[i] = spoil(t, v[i])
		return v
	case string:
		return rapid.SampledFrom([]string{"", "SENDING", "PENDING", "DEAD", "sent", "ticket:b0000", "2026-13-01", "-1", "9e99"}).Draw(t, "text")
	case bool:
		return !v
	default:
		return rapid.SampledFrom([]any{nil, 0, -1, 1, int64(1) << 62, 0.5, "x", []any{}, map[string]any{}}).Draw(t, "value")
	}
}
