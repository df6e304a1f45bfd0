// Package control is the HTTP side of a fake server, the same for every
// protocol: ledger, verdicts, rules, holds, clock, metrics, and a page for
// people. It changes nothing by itself but what a request asks for.
//
// It is meant for loopback and test networks: there is no login. A browser is
// kept from being used against it (requests that carry a foreign Origin are
// refused), and mails are shown in a sandbox without scripts or network.
//
// It imports nothing of this module but fakes/script and fakes/ledger.
package control

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

//go:embed web
var web embed.FS

// API is the fake that is controlled.
type API struct {
	// Name of the protocol ("smtp") and facts for people ("address",
	// "mode" …).
	Name   string
	Facts  map[string]string
	Engine *script.Engine
	Holds  *script.Holds
	Ledger *ledger.Ledger
	// Presets are rules that the page offers to begin with.
	Presets []Preset
	// Now is the clock of the ledger's times.
	Now func() int64
	// Mail returns the kept beginning of a stored mail by its row's ID.
	Mail func(id int64) ([]byte, bool)
	// Forget empties what the server itself keeps (mails).
	Forget func()
	// Extra are further routes, by their patterns ("GET /deliveries").
	Extra map[string]http.HandlerFunc
	// Open lets new connections in, or refuses them; nil if the server cannot.
	Open func(open bool) error
}

// Preset is a rule with a name for people.
type Preset struct {
	Name string      `json:"name"`
	Rule script.Rule `json:"rule"`
}

// maxBody bounds a request's body.
const maxBody = 1 << 20

type handler struct {
	API
	since atomic.Pointer[time.Time] // the ledger is complete from then on
}

// began notes that the ledger is empty.
func (h *handler) began() {
	now := time.Now()
	h.since.Store(&now)
}

// Handler serves the control API and the page. Mount it at "/", or below a
// prefix by http.StripPrefix; all its links are relative.
func Handler(api API) http.Handler {
	h := &handler{API: api}
	h.began()
	mux := http.NewServeMux()
	for pattern, f := range h.routes() {
		mux.HandleFunc(pattern, f)
	}
	for pattern, f := range h.Extra {
		mux.HandleFunc(pattern, f)
	}
	mux.Handle("GET /", h.page())
	return guard(mux)
}

// routes is the API as openapi.json describes it; a test holds them together.
func (h *handler) routes() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"GET /ledger":          h.ledger,
		"GET /log":             h.log,
		"GET /events":          h.events,
		"GET /verdict":         h.verdict,
		"GET /sessions":        h.sessions,
		"GET /decisions":       h.decisions,
		"GET /rules":           h.rules,
		"POST /rules":          h.addRules,
		"DELETE /rules":        h.clearRules,
		"DELETE /rules/{id}":   h.removeRule,
		"GET /holds":           h.holds,
		"POST /release":        h.release,
		"POST /reset":          h.reset,
		"GET /clock":           h.clock,
		"POST /clock":          h.moveClock,
		"POST /listener":       h.listener,
		"GET /mails/{id}":      h.mail,
		"GET /mails/{id}/raw":  h.rawMail,
		"GET /mails/{id}/html": h.htmlMail,
		"GET /status":          h.status,
		"GET /healthz":         h.health,
		"GET /metrics":         promhttp.HandlerFor(h.registry(), promhttp.HandlerOpts{}).ServeHTTP,
	}
}

// guard refuses what a foreign web page could make a browser send, and bounds
// bodies.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if o := r.Header.Get("Origin"); o != "" {
			if u, err := url.Parse(o); err != nil || u.Host != r.Host {
				fail(w, http.StatusForbidden, errors.New("requests from other origins are refused"))
				return
			}
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next.ServeHTTP(w, r)
	})
}

// page serves the embedded files.
func (h *handler) page() http.Handler {
	sub, err := fs.Sub(web, "web")
	if err != nil {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fail(w, http.StatusInternalServerError, err) })
	}
	files := http.FileServerFS(sub)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy",
			"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Referrer-Policy", "no-referrer")
		files.ServeHTTP(w, r)
	})
}

func write(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // the client left: nobody to tell
}

// lines begins an answer of JSON lines.
func lines(w http.ResponseWriter) *json.Encoder {
	w.Header().Set("Content-Type", "application/x-ndjson")
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false) // Message-IDs stay readable
	return enc
}

func fail(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
}

// read decodes a request's body into v; an empty body leaves v as it is.
func read(w http.ResponseWriter, r *http.Request, v any) bool {
	data, ok := readAll(w, r)
	if !ok || len(data) == 0 {
		return ok
	}
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("body: %w", err))
		return false
	}
	return true
}

func readAll(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	data, err := io.ReadAll(r.Body)
	if err == nil {
		return data, true
	}
	status := http.StatusBadRequest
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		status = http.StatusRequestEntityTooLarge
	}
	fail(w, status, fmt.Errorf("reading the body: %w", err))
	return nil, false
}

func number(q url.Values, name string, def int64) (int64, error) {
	s := q.Get(name)
	if s == "" {
		return def, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s=%q is not a number of at least 0", name, s)
	}
	return n, nil
}

// window is which rows a request asks for.
type window struct {
	filter ledger.Filter
	since  int64
	limit  int64
}

func (h *handler) window(r *http.Request, limit int64) (window, error) {
	q := r.URL.Query()
	var win window
	var err error
	if win.filter, err = ledger.ParseFilter(q, "since", "limit", "tail", "format", "running"); err != nil {
		return win, err
	}
	if win.since, err = number(q, "since", 0); err != nil {
		return win, err
	}
	if win.limit, err = number(q, "limit", limit); err != nil {
		return win, err
	}
	tail, err := number(q, "tail", 0)
	if err != nil {
		return win, err
	}
	if _, last := h.Ledger.Changed(); tail > 0 {
		win.since, win.limit = max(win.since, last-tail), tail
	}
	return win, nil
}

// each calls f for the rows in the window; a limit of 0 means all.
func (h *handler) each(win window, f func(ledger.Attempt)) error {
	var n int64
	return h.Ledger.Each(win.since, func(a ledger.Attempt) bool {
		if win.filter.Match(a) {
			f(a)
			n++
		}
		return win.limit == 0 || n < win.limit
	})
}

// jsonLimit bounds an answer that is built in memory; JSON lines have no bound.
const jsonLimit = 10_000

func (h *handler) ledger(w http.ResponseWriter, r *http.Request) {
	if lines := r.URL.Query().Get("format"); lines == "jsonl" || strings.Contains(r.Header.Get("Accept"), "ndjson") {
		h.ledgerLines(w, r)
		return
	}
	win, err := h.window(r, jsonLimit)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	win.limit = min(max(win.limit, 1), jsonLimit)
	rows := []ledger.Attempt{}
	next := win.since
	err = h.each(win, func(a ledger.Attempt) { rows, next = append(rows, a), a.Seq })
	if err != nil {
		fail(w, http.StatusInternalServerError, err)
		return
	}
	running := []ledger.Attempt{}
	for _, a := range h.Ledger.Running() {
		if win.filter.Match(a) {
			running = append(running, a)
		}
	}
	write(w, map[string]any{"rows": rows, "next": next, "running": running, "now": h.Now()})
}

// ledgerLines streams finished rows, one JSON object per line.
func (h *handler) ledgerLines(w http.ResponseWriter, r *http.Request) {
	win, err := h.window(r, 0)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	enc := lines(w)
	if err := h.each(win, func(a ledger.Attempt) { _ = enc.Encode(a) }); err != nil {
		_ = enc.Encode(map[string]string{"error": err.Error()})
	}
}

// log is the delivery log as a customer would read it. The header Log-Reach says
// for how many seconds back it is complete: what is older may be missing. With
// running=true the tries that still run come first; one that ends meanwhile is
// shown twice, never not at all.
func (h *handler) log(w http.ResponseWriter, r *http.Request) {
	win, err := h.window(r, 0)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	running := false
	if v := r.URL.Query().Get("running"); v != "" {
		if running, err = strconv.ParseBool(v); err != nil {
			fail(w, http.StatusBadRequest, fmt.Errorf("running=%q is not true or false", v))
			return
		}
	}
	w.Header().Set("Log-Reach", strconv.FormatInt(int64(time.Since(*h.since.Load())/time.Second), 10))
	enc := lines(w)
	if running {
		for _, a := range h.Ledger.Running() {
			if win.filter.Match(a) {
				_ = enc.Encode(a.Log())
			}
		}
	}
	if err := h.each(win, func(a ledger.Attempt) { _ = enc.Encode(a.Log()) }); err != nil {
		_ = enc.Encode(map[string]string{"error": err.Error()})
	}
}

func (h *handler) verdict(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if key := q.Get("key"); key != "" {
		v, err := h.Ledger.Verdict(key)
		if err != nil {
			fail(w, http.StatusInternalServerError, err)
			return
		}
		write(w, v)
		return
	}
	all, err := h.Ledger.Verdicts()
	if err != nil {
		fail(w, http.StatusInternalServerError, err)
		return
	}
	counts := map[string]int{}
	kept := []ledger.Verdict{}
	for _, v := range all {
		counts[v.Verdict]++
		if only := q.Get("only"); only == "" || only == v.Verdict {
			kept = append(kept, v)
		}
	}
	write(w, map[string]any{"keys": len(all), "counts": counts, "verdicts": kept})
}

func (h *handler) sessions(w http.ResponseWriter, _ *http.Request) {
	write(w, map[string]any{"sessions": h.Ledger.Sessions()})
}

func (h *handler) decisions(w http.ResponseWriter, r *http.Request) {
	since, err := number(r.URL.Query(), "since", 0)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	ds := h.Engine.Decisions(since)
	if ds == nil {
		ds = []script.Decision{}
	}
	write(w, map[string]any{"seed": h.Engine.Seed(), "decisions": ds})
}

func (h *handler) rules(w http.ResponseWriter, _ *http.Request) {
	write(w, map[string]any{"seed": h.Engine.Seed(), "rules": h.Engine.Rules()})
}

func (h *handler) addRules(w http.ResponseWriter, r *http.Request) {
	data, ok := readAll(w, r)
	if !ok {
		return
	}
	rules, err := script.ParseRules(data)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	ids, err := h.Engine.AddAll(rules)
	if err != nil {
		fail(w, http.StatusUnprocessableEntity, err)
		return
	}
	w.WriteHeader(http.StatusCreated)
	write(w, map[string]any{"ids": ids})
}

func (h *handler) clearRules(w http.ResponseWriter, _ *http.Request) {
	h.Engine.Clear()
	w.WriteHeader(http.StatusNoContent)
}

func (h *handler) removeRule(w http.ResponseWriter, r *http.Request) {
	if id := r.PathValue("id"); !h.Engine.Remove(id) {
		fail(w, http.StatusNotFound, fmt.Errorf("there is no rule %q", id))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (h *handler) holds(w http.ResponseWriter, _ *http.Request) {
	write(w, map[string]any{"holds": h.Holds.List()})
}

func (h *handler) release(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		ID  int64 `json:"id"`
		All bool  `json:"all"`
	}
	if !read(w, r, &ask) {
		return
	}
	switch {
	case ask.All == (ask.ID != 0):
		fail(w, http.StatusBadRequest, errors.New(`body: want {"id": n} or {"all": true}`))
	case ask.All:
		write(w, map[string]int{"released": h.Holds.ReleaseAll()})
	case !h.Holds.Release(ask.ID):
		fail(w, http.StatusNotFound, fmt.Errorf("nothing is held as %d", ask.ID))
	default:
		write(w, map[string]int{"released": 1})
	}
}

// reset forgets the ledger, the mails and what was counted; held sessions go
// on. Rules stay unless asked for.
func (h *handler) reset(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Rules bool `json:"rules"`
	}
	if !read(w, r, &ask) {
		return
	}
	if ask.Rules {
		h.Engine.Clear()
	}
	h.Holds.ReleaseAll()
	h.Ledger.Reset()
	h.began()
	h.Engine.Forget()
	if h.Forget != nil {
		h.Forget()
	}
	w.WriteHeader(http.StatusNoContent)
}

func (h *handler) clock(w http.ResponseWriter, _ *http.Request) {
	write(w, map[string]any{"since_start": h.Engine.Now().String(), "monotonic_ns": h.Now()})
}

func (h *handler) moveClock(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Advance script.Duration `json:"advance"`
	}
	if !read(w, r, &ask) {
		return
	}
	if ask.Advance == 0 {
		fail(w, http.StatusBadRequest, errors.New(`body: want {"advance": "24h"}`))
		return
	}
	h.Engine.Advance(ask.Advance.D())
	h.clock(w, r)
}

func (h *handler) listener(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Open *bool `json:"open"`
	}
	if !read(w, r, &ask) {
		return
	}
	switch {
	case h.Open == nil:
		fail(w, http.StatusNotImplemented, errors.New("this server cannot refuse connections"))
		return
	case ask.Open == nil:
		fail(w, http.StatusBadRequest, errors.New(`body: want {"open": true} or {"open": false}`))
		return
	}
	if err := h.Open(*ask.Open); err != nil {
		fail(w, http.StatusConflict, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (h *handler) status(w http.ResponseWriter, _ *http.Request) {
	write(w, map[string]any{
		"name": h.Name, "facts": h.Facts, "seed": h.Engine.Seed(), "totals": h.Ledger.Totals(),
		"presets": h.Presets, "now": h.Now(), "wall": time.Now(), "holds": len(h.Holds.List()), "rules": len(h.Engine.Rules()),
	})
}

// health is red when the ledger can no longer keep what happened.
func (h *handler) health(w http.ResponseWriter, _ *http.Request) {
	if err := h.Ledger.Err(); err != nil {
		fail(w, http.StatusServiceUnavailable, err)
		return
	}
	write(w, map[string]string{"status": "ok"})
}

// registry exposes the totals to Prometheus.
func (h *handler) registry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	labels := prometheus.Labels{"server": h.Name}
	for name, m := range map[string]struct {
		help string
		get  func(ledger.Totals) int64
	}{
		"fake_attempts_total":     {"Tries that are over.", func(t ledger.Totals) int64 { return t.Rows }},
		"fake_stored_total":       {"Copies kept.", func(t ledger.Totals) int64 { return t.Stored }},
		"fake_doubled_total":      {"Copies beyond the first of their key and recipient.", func(t ledger.Totals) int64 { return t.Doubled }},
		"fake_deduplicated_total": {"Tries whose key was known already.", func(t ledger.Totals) int64 { return t.Deduplicated }},
		"fake_accepted_total":     {"Positive final answers written whole.", func(t ledger.Totals) int64 { return t.Accepted }},
		"fake_refused_total":      {"Negative final answers written whole.", func(t ledger.Totals) int64 { return t.Refused }},
		"fake_silent_total":       {"Tries that ended without a whole final answer.", func(t ledger.Totals) int64 { return t.Silent }},
		"fake_struck_total":       {"Tries that a fault struck.", func(t ledger.Totals) int64 { return t.Struck }},
		"fake_breaches_total":     {"Tries in which the script broke the protocol.", func(t ledger.Totals) int64 { return t.Breaches }},
		"fake_findings_total":     {"Tries in which the client did what a careful one does not.", func(t ledger.Totals) int64 { return t.Findings }},
		"fake_sessions_total":     {"Connections that are over.", func(t ledger.Totals) int64 { return t.Sessions }},
	} {
		get := m.get
		reg.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: name, Help: m.help, ConstLabels: labels},
			func() float64 { return float64(get(h.Ledger.Totals())) }))
	}
	reg.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "fake_running", Help: "Tries that run.", ConstLabels: labels},
			func() float64 { return float64(h.Ledger.Totals().Open) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "fake_held", Help: "Sessions that wait to be released.", ConstLabels: labels},
			func() float64 { return float64(len(h.Holds.List())) }),
	)
	return reg
}

// keepAlive is how often an idle event stream shows that it lives.
const keepAlive = 15 * time.Second

// events streams finished rows as they come (event "row", id = Seq) and the
// list of holds as it changes (event "holds"). Last-Event-ID or ?since= say
// where to begin; else it begins now.
func (h *handler) events(w http.ResponseWriter, r *http.Request) {
	since, err := h.eventStart(r)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	s := &stream{h: h, w: w, out: http.NewResponseController(w), seq: since}
	s.run(r.Context())
}

func (h *handler) eventStart(r *http.Request) (int64, error) {
	if id := r.Header.Get("Last-Event-ID"); id != "" {
		n, err := strconv.ParseInt(id, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("Last-Event-ID %q is not a number", id)
		}
		return n, nil
	}
	_, last := h.Ledger.Changed()
	return number(r.URL.Query(), "since", last)
}

type stream struct {
	h   *handler
	w   io.Writer
	out *http.ResponseController
	seq int64
	err error
}

func (s *stream) run(ctx context.Context) {
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	for s.err == nil {
		rows, last := s.h.Ledger.Changed()
		holds := s.h.Holds.Changed()
		if last < s.seq {
			s.seq = 0 // the ledger was reset
			s.event("reset", 0, struct{}{})
		}
		s.rows(ctx)
		s.event("holds", -1, s.h.Holds.List())
		if s.err = errors.Join(s.err, s.out.Flush()); s.err != nil {
			return
		}
		select {
		case <-rows:
		case <-holds:
		case <-tick.C:
			_, s.err = io.WriteString(s.w, ": alive\n\n")
		case <-ctx.Done():
			return
		}
	}
}

func (s *stream) rows(ctx context.Context) {
	err := s.h.Ledger.Each(s.seq, func(a ledger.Attempt) bool {
		s.event("row", a.Seq, a)
		s.seq = a.Seq
		return s.err == nil && ctx.Err() == nil
	})
	s.err = errors.Join(s.err, err)
}

func (s *stream) event(name string, id int64, v any) {
	data, err := json.Marshal(v)
	if err == nil && id >= 0 {
		_, err = fmt.Fprintf(s.w, "id: %d\n", id)
	}
	if err == nil {
		_, err = fmt.Fprintf(s.w, "event: %s\ndata: %s\n\n", name, data)
	}
	s.err = errors.Join(s.err, err)
}
