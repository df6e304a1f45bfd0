package target_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metricsql"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/target"
)

const operationsDir = "../docs/operations"

// Every metric and label that the dashboard and the alert rules name is exported
// by processes that have just started, and every metric that they export is
// explained to people.
func TestDashboardAndRulesNameWhatIsExported(t *testing.T) {
	queries := dashboard(t)
	require.Greater(t, len(queries), 40)
	maps.Copy(queries, rules(t))

	server := mailServer(t)
	p := start(t, config(t, "operate", server, &journal{}))
	var exported samples
	// The sampled gauges come with the first round.
	require.Eventually(t, func() bool {
		exported = samples{}
		for _, process := range []string{"bookingd-1", "notifyd-1"} {
			exported.scrape(t, p.Addr(process))
		}
		return exported.has("notifyd_kafka_lag_events") && exported.has("notifyd_queue_messages") && exported.has("notifyd_mails_due") &&
			exported.has("booking_mail_events_lag")
	}, time.Minute, 200*time.Millisecond)
	confirm(t, p, 1) // requests are counted by what was asked for
	settle(t, p)
	exported.scrape(t, p.Addr("bookingd-1"))

	for where, query := range queries {
		for _, problem := range exported.problems(t, query) {
			t.Errorf("%s: %s: %s", where, query, problem)
		}
	}

	readme, err := os.ReadFile(filepath.Join(operationsDir, "README.md"))
	require.NoError(t, err)
	for name := range exported {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "promhttp_") {
			continue
		}
		base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
		require.Contains(t, string(readme), "`"+strings.Replace(base, "notifyd_outbox_", "outbox_", 1)+"`", "docs/operations/README.md does not explain it")
	}
}

// samples are what was scraped: metric → label → values.
type samples map[string]map[string]map[string]bool

func (s samples) has(metric string) bool { return s[metric] != nil }

var labelPattern = regexp.MustCompile(`(\w+)="([^"]*)"`)

func (s samples) scrape(t *testing.T, addr string) {
	t.Helper()
	require.NotEmpty(t, addr)
	resp, err := http.Get("http://" + addr + "/metrics")
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		name := line[:strings.IndexAny(line, "{ ")]
		if s[name] == nil {
			s[name] = map[string]map[string]bool{}
		}
		for _, m := range labelPattern.FindAllStringSubmatch(line, -1) {
			if s[name][m[1]] == nil {
				s[name][m[1]] = map[string]bool{}
			}
			s[name][m[1]][m[2]] = true
		}
	}
	require.NoError(t, lines.Err())
}

// problems of a query: it does not parse, or names what nobody exports. "up",
// "job" and "instance" are Prometheus' own.
func (s samples) problems(t *testing.T, query string) []string {
	t.Helper()
	expr, err := metricsql.Parse(query)
	if err != nil {
		return []string{"does not parse: " + err.Error()}
	}
	var found []string
	metricsql.VisitAll(expr, func(e metricsql.Expr) {
		m, ok := e.(*metricsql.MetricExpr)
		if !ok {
			return
		}
		for _, filters := range m.LabelFilterss {
			found = append(found, s.missing(filters)...)
		}
	})
	return found
}

func (s samples) missing(filters []metricsql.LabelFilter) (found []string) {
	metric := ""
	for _, f := range filters {
		if f.Label == "__name__" {
			metric = f.Value
		}
	}
	if metric == "up" {
		return nil
	}
	if !s.has(metric) {
		return []string{"nobody exports " + metric}
	}
	for _, f := range filters {
		if f.Label == "__name__" || f.Label == "job" || f.Label == "instance" {
			continue
		}
		if s[metric][f.Label] == nil || !f.IsNegative && !f.IsRegexp && !s[metric][f.Label][f.Value] {
			found = append(found, fmt.Sprintf("%s has no %s=%q", metric, f.Label, f.Value))
		}
	}
	return found
}

// dashboard returns its queries by panel.
func dashboard(t *testing.T) map[string]string {
	t.Helper()
	var d struct {
		Title  string `json:"title"`
		Panels []struct {
			ID      int    `json:"id"`
			Title   string `json:"title"`
			Type    string `json:"type"`
			GridPos struct{ X, Y, W, H int }
			Targets []struct {
				RefID string `json:"refId"`
				Expr  string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	body, err := os.ReadFile(filepath.Join(operationsDir, "dashboard.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(body, &d))
	require.NotEmpty(t, d.Title)
	queries, ids := map[string]string{}, map[int]bool{}
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "panel %q has another's id", p.Title)
		ids[p.ID] = true
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		require.True(t, p.Type == "row" || len(p.Targets) > 0, p.Title)
		for _, q := range p.Targets {
			queries["panel "+p.Title+" "+q.RefID] = q.Expr
		}
	}
	return queries
}

// rules returns the expressions of the alert rules; each has a severity, a
// summary, and a runbook that exists.
func rules(t *testing.T) map[string]string {
	t.Helper()
	var f struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	body, err := os.ReadFile(filepath.Join(operationsDir, "alerts.yml"))
	require.NoError(t, err)
	dec := yaml.NewDecoder(strings.NewReader(string(body)))
	dec.KnownFields(true)
	require.NoError(t, dec.Decode(&f))
	queries := map[string]string{}
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			require.Contains(t, []string{"page", "ticket"}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			require.FileExists(t, filepath.Join("..", r.Annotations["runbook"]), r.Alert)
			if r.For != "" {
				_, err := time.ParseDuration(r.For)
				require.NoError(t, err, r.Alert)
			}
			require.NotContains(t, queries, "alert "+r.Alert)
			queries["alert "+r.Alert] = r.Expr
		}
	}
	require.Greater(t, len(queries), 10)
	return queries
}

// OB-13, over the logs of a real run: each hop names the mail by the same
// dedupe_key and event_id, the tries with their number, and the provider's id
// once there is one; a mail that is refused once, one that dies, one that is
// cancelled.
func TestEveryHopNamesTheMail(t *testing.T) {
	server := mailServer(t,
		smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("late@example.test").Times(1).Rule(),
		smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To("bad@example.test").Rule())
	p := start(t, config(t, "hops", server, &journal{}))
	for _, id := range []string{"plain", "late", "bad"} {
		require.Equal(t, history.OpOK, p.Confirm(t.Context(), id, id+"@example.test"))
	}
	settle(t, p)
	require.Equal(t, history.OpOK, p.Cancel(t.Context(), "plain"))
	settle(t, p)
	logs := readLogs(t, p)
	final, err := p.Final(t.Context())
	require.NoError(t, err)
	events := map[string]string{}
	for _, r := range final.Rows {
		events[r.Key] = r.EventID
	}

	type hop struct {
		process, msg string
		attempts     float64 // -1: the hop knows of no tries
		provider     bool    // the line names the provider's id
		event        bool    // under the event's own id, else under one of its own
	}
	for key, hops := range map[string][]hop{
		"ticket:plain": {
			{"bookingd", "event written", -1, false, true},
			{"bookingd", "event published", -1, false, true},
			{"notifyd", "event", -1, false, true},
			{"notifyd", "sent", 1, true, true},
			{"notifyd", "event published", 1, true, false},
			{"bookingd", "mail event", 1, true, false},
			{"notifyd", "cancel", -1, false, false},
		},
		"ticket:late": {{"notifyd", "not sent", 1, false, true}, {"notifyd", "sent", 2, true, true}, {"bookingd", "mail event", 2, true, false}},
		"ticket:bad":  {{"notifyd", "not sent", 1, false, true}, {"notifyd", "alert", 1, false, true}, {"bookingd", "mail event", 1, false, false}},
	} {
		require.NotEmpty(t, events[key], key)
		for _, h := range hops {
			require.Eventually(t, func() bool {
				logs = readLogs(t, p)
				return slices.ContainsFunc(logs[h.process], func(line map[string]any) bool {
					return line["msg"] == h.msg && line["dedupe_key"] == key && line["event_id"] != nil && line["event_id"] != "" &&
						(!h.event || line["event_id"] == events[key]) &&
						(h.attempts < 0 || line["attempts"] == h.attempts) &&
						(!h.provider || line["provider_id"] != nil && line["provider_id"] != "")
				})
			}, 20*time.Second, 100*time.Millisecond, "%s: no line %+v", key, h)
		}
	}
	for process, lines := range logs {
		for _, line := range lines {
			text, err := json.Marshal(line)
			require.NoError(t, err)
			require.NotRegexp(t, `(plain|late|bad)@example\.test`, string(text), "%s logs an address", process)
		}
	}
}

// readLogs parses every log of the run, by kind of process.
func readLogs(t *testing.T, p *target.Pipeline) map[string][]map[string]any {
	t.Helper()
	logs := map[string][]map[string]any{}
	for _, proc := range p.Processes() {
		body, err := os.ReadFile(proc.Log())
		require.NoError(t, err)
		kind, _, _ := strings.Cut(proc.Name(), "-")
		for line := range strings.Lines(string(body)) {
			var parsed map[string]any
			if json.Unmarshal([]byte(line), &parsed) == nil { // the last line may be half written
				logs[kind] = append(logs[kind], parsed)
			}
		}
	}
	return logs
}
