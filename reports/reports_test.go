package reports

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/infra"
	"mailproof/verify"
)

// red is a run with everything in it that a report can show.
func red() Summary {
	broken := Scenario{
		Name: "t6.2", Title: "the mail service is killed while it sends", Verdict: verify.Fail, Seconds: 61.5, Seed: 7,
		Policy: "hold", Guarantee: "Plain receiver, hold: at most one copy.",
		Findings: []verify.Finding{{
			Invariant: "at-most-one", Verdict: verify.Fail, Key: "ticket:<b>&1",
			Text:  "2 copies were kept\x00, 1 is allowed <script>alert(1)</script>",
			Story: []string{"+0.0 ms client  confirm", "+9.9 ms server  stored <first>"},
		}},
		Faults: []FaultResult{
			{Name: "kill-while-held", Outcome: history.Installed, Witness: "24 sessions held", Count: 24},
			{Name: "kill-at-random", Outcome: history.Indeterminate, Reason: "inject: no such process"},
		},
		Counts:     Counts{Confirmed: 550, Delivered: 540, Duplicates: 1, Unknown: 10},
		Latency:    Latency{N: 550, P50: 41.2, P95: -1, P99: -1, Max: -1},
		Measured:   []Measurement{{Name: "notifyd CPU", Value: 12.345, Unit: "%", Note: "of one core"}},
		Command:    "mailproof chaos --scenario t6.2/hold --seed 7",
		Invariants: []Checked{{Name: "at-most-one", Statement: "one copy", Looked: 550, Findings: 1}},
		Queues:     []history.QueueState{{Name: "q.notify.ticket", Type: "quorum", Members: 3}},
		Dir:        "t6.2-hold",
	}
	shown := broken.Faults
	FromHistory(sample(), &broken)
	broken.Faults = shown
	green := Scenario{Name: "t6.1", Title: "duplicates", Policy: "resend", Verdict: verify.Pass, Seconds: 20, Seed: 7, Counts: Counts{Confirmed: 520, Delivered: 520}, Latency: Latency{N: 520, P50: 20, P95: 44.4, P99: 80, Max: 1234}}
	vague := Scenario{Name: "t6.2", Title: "killed", Policy: "resend", Verdict: verify.Invalid, Seconds: 1, Seed: 7, Command: "again"}
	return Summary{
		Verdict: verify.Fail, Seed: 7, Seconds: 100, RunID: "r1", Command: "mailproof chaos --seed 7",
		Versions:  infra.Versions{Postgres: "15.14", RabbitMQ: "3.10.8", Kafka: "4.3.1", KafkaKind: "apache"},
		Scenarios: []Scenario{broken, green, vague},
	}
}

// sample is a history of four mails: one copy, two copies, none, none.
func sample() *history.History {
	const ms = int64(time.Millisecond)
	at := func(n int64) int64 { return 1_000_000 + n*ms }
	records := []history.Record{
		{T: at(0), Kind: history.KindMeta, Meta: &history.Meta{Scenario: "t6.2", Policy: "hold", Server: "plain", Wall: time.Unix(0, 0)}},
		{T: at(0), Kind: history.KindPhase, Phase: &history.Phase{Name: "start"}},
		{T: at(100), Kind: history.KindPhase, Phase: &history.Phase{Name: "faults"}},
		{T: at(9000), Kind: history.KindFault, Fault: &history.Fault{
			Name: "kill-while-held", Target: "notifyd", Start: at(100), End: at(8000), Outcome: history.Installed, Witness: "w", Count: 24,
		}},
		{T: at(300), Kind: history.KindProcess, Process: &history.Process{Name: "notifyd", PID: 9, Event: "killed"}},
		{T: at(9500), Kind: history.KindFinal, Final: &history.Final{Queues: []history.QueueState{{Name: "q.notify.ticket", Type: "quorum", Members: 3}}}},
	}
	for i, key := range []string{"a", "b", "c", "d"} {
		n := int64(200 + 100*i)
		records = append(records, history.Record{T: at(n + 5), Kind: history.KindOp, Op: &history.Op{
			Name: "confirm", Key: key, Booking: key, Intended: at(n), Call: at(n), Return: at(n + 5), Outcome: history.OpOK,
		}})
		for range map[string]int{"a": 1, "b": 2}[key] {
			records = append(records, history.Record{T: at(n + 50), Kind: history.KindAttempt, Attempt: &history.Attempt{
				ID: n, Key: key, From: at(n + 20), DotAt: at(n + 40), To: at(n + 50), Stored: true,
			}})
		}
	}
	return history.FromRecords(records)
}

func write(t *testing.T, s Summary) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, Write(dir, s))
	return dir
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	body, err := os.ReadFile(filepath.Join(dir, name))
	require.NoError(t, err)
	return string(body)
}

func TestSummaryHasTheAgreedShape(t *testing.T) {
	var got map[string]any
	require.NoError(t, json.Unmarshal([]byte(read(t, write(t, red()), "summary.json")), &got))
	require.Equal(t, "fail", got["verdict"])
	require.EqualValues(t, 7, got["seed"])
	require.EqualValues(t, 100, got["seconds"])
	versions := got["versions"].(map[string]any)
	for _, name := range []string{"postgres", "rabbitmq", "kafka"} {
		require.NotEmpty(t, versions[name], name)
	}
	require.Equal(t, "apache", versions["kafka_kind"])
	list := got["scenarios"].([]any)
	require.Len(t, list, 3)
	for _, entry := range list {
		sc := entry.(map[string]any)
		for _, name := range []string{"name", "verdict", "seconds", "seed", "policy", "findings", "faults", "counts", "latency_ms"} {
			require.Contains(t, sc, name)
		}
		require.IsType(t, []any{}, sc["findings"], "a list, also when it is empty")
		require.IsType(t, []any{}, sc["faults"])
		for _, name := range []string{"confirmed", "delivered", "duplicates", "lost", "unknown", "dead", "cancelled"} {
			require.Contains(t, sc["counts"], name)
		}
		for _, name := range []string{"n", "p50", "p95", "p99", "max"} {
			require.Contains(t, sc["latency_ms"], name)
		}
	}
	fault := list[0].(map[string]any)["faults"].([]any)[0].(map[string]any)
	require.Equal(t, "kill-while-held", fault["name"])
	require.Equal(t, "installed", fault["outcome"])
	require.Equal(t, "24 sessions held", fault["witness"])
}

func TestSummaryReadsBack(t *testing.T) {
	want := red()
	got, err := Read(write(t, want))
	require.NoError(t, err)
	require.Equal(t, want.Verdict, got.Verdict)
	require.Equal(t, want.Scenarios[0].Findings, got.Scenarios[0].Findings)
	require.Equal(t, want.Scenarios[0].Counts, got.Scenarios[0].Counts)
}

func TestJUnitIsWellFormedAndKeepsFailuresAndErrorsApart(t *testing.T) {
	body := read(t, write(t, red()), "junit.xml")
	var got junitSuites
	require.NoError(t, xml.Unmarshal([]byte(body), &got))
	require.Equal(t, 3, got.Tests)
	require.Equal(t, 1, got.Failures)
	require.Equal(t, 1, got.Errors, "invalid is no failure of the system")
	require.Len(t, got.Suites, 2)
	failed := got.Suites[0].Cases[0]
	require.Equal(t, "t6.2/hold", failed.Name)
	require.Contains(t, failed.Failure.Text, "<script>", "escaped, not dropped")
	require.Contains(t, failed.Failure.Text, "--scenario t6.2/hold --seed 7")
	require.NotContains(t, body, "\x00")
	dec := xml.NewDecoder(strings.NewReader(body))
	for {
		if _, err := dec.Token(); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestPageShowsFindingsAndEscapesThem(t *testing.T) {
	page := read(t, write(t, red()), "index.html")
	require.NotContains(t, page, "<script>alert")
	require.Contains(t, page, "&lt;script&gt;alert(1)&lt;/script&gt;")
	require.Contains(t, page, "ticket:&lt;b&gt;&amp;1")
	require.Contains(t, page, "stored &lt;first&gt;")
	require.Contains(t, page, "24 sessions held")
	require.Contains(t, page, "no witness: inject: no such process")
	require.Contains(t, page, "--scenario t6.2/hold --seed 7")
	require.Contains(t, page, "Plain receiver, hold")
	require.NotContains(t, page, "http://", "the page needs nothing from elsewhere")
	require.NotContains(t, page, "https://")
	require.Contains(t, page, `class="doubled" d="M`)
	require.Contains(t, page, `class="missing" d="M`)
	require.NotContains(t, page, "ZgotmplZ", "nothing was judged unsafe and replaced")
}

func TestMarkdownNamesEachCell(t *testing.T) {
	md := read(t, write(t, red()), "summary.md")
	require.Contains(t, md, "| t6.2 | hold | **fail** | 550 | 540 | 1 | 0 | 10 | 0 | ∞ |")
	require.Contains(t, md, "| t6.1 | resend | **pass** | 520 | 520 | 0 | 0 | 0 | 0 | 44.4 ms |")
	require.Contains(t, md, "kill-at-random, indeterminate: no witness")
}

func TestFaultsOfOneFamilyAreOneWord(t *testing.T) {
	t.Parallel()
	words := faultWords([]FaultResult{
		{Name: "crash a kill", Witness: "w", Count: 1},
		{Name: "lose-250", Witness: "w", Count: 7},
		{Name: "crash b kill", Witness: "w", Count: 2},
		{Name: "crash c pause", Outcome: "installed"},
	})
	require.Equal(t, []string{"crash ×3 (1 without a witness)", "lose-250 ×7"}, words)
	require.Equal(t, []string{"kill-at-random (no witness)"}, faultWords([]FaultResult{{Name: "kill-at-random", Outcome: "indeterminate"}}))
	require.Empty(t, faultWords(nil))
}

func TestTableHasARowPerCell(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	Table(&b, red(), false, 0)
	require.Contains(t, b.String(), "kill-while-held ×24")
	require.Contains(t, b.String(), "kill-at-random (no witness)")
	require.NotContains(t, b.String(), "\x1b", "no colours where none are asked for")
	for _, sc := range red().Scenarios {
		require.Regexp(t, `(?m)^`+regexp.QuoteMeta(sc.Name+"/"+sc.Policy)+` +`+string(sc.Verdict)+` `, b.String())
	}
}

// TestTableFits: with long names, a long verdict and many faults no line is wider
// than the terminal, or than a log's page where there is none, and nothing is cut.
func TestTableFits(t *testing.T) {
	t.Parallel()
	s := Summary{Scenarios: []Scenario{{
		Name: "crash-session", Policy: "same-key", Verdict: verify.HarnessError, Seconds: 1234,
		Counts: Counts{Confirmed: 50549, Delivered: 50550, Unknown: 1234, Dead: 5678},
	}}}
	for i := range 40 {
		s.Scenarios[0].Faults = append(s.Scenarios[0].Faults, FaultResult{Name: fmt.Sprintf("fault-%d", i), Witness: "seen", Count: 100})
	}
	for width, bound := range map[int]int{80: 80, 120: 120, 0: plainWidth} {
		for _, colours := range []bool{false, true} {
			var b strings.Builder
			Table(&b, s, colours, width)
			require.LessOrEqual(t, text.LongestLineLen(b.String()), bound, "width %d:\n%s", width, b.String())
			for _, f := range s.Scenarios[0].Faults {
				require.Contains(t, b.String(), f.Name+" ×100")
			}
			require.Contains(t, b.String(), "50549")
		}
	}
}

func TestChartDrawsEachMailOnce(t *testing.T) {
	c := drawChart(sample(), mails(sample()))
	require.Equal(t, 1, strings.Count(c.Delivered, "M"))
	require.Equal(t, 1, strings.Count(c.Doubled, "M"))
	require.Equal(t, 2, strings.Count(c.Missing, "l5 5"))
	require.Len(t, c.Bands, 1)
	require.Len(t, c.Kills, 1)
	require.Positive(t, c.Bands[0].W)
	require.False(t, drawChart(&history.History{}, nil).Drawn)
}

func TestReportOfARunThatNeverBegan(t *testing.T) {
	page := read(t, write(t, Summary{Verdict: verify.HarnessError, Seed: 1, RunID: "r", Command: "again"}), "index.html")
	require.Contains(t, page, "harness-error")
}
