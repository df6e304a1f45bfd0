package benchmarks

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"mailproof/history"
	"mailproof/history/wal"
)

// The boundaries of a ticket's way, each where the hop of this name ends.
var hopTable = []Stage{
	{Name: "commit", From: "intended time of the confirmation", To: "commit record of booking and outbox row (write-ahead log)", Floor: stepCommit},
	{Name: "relay", From: "that commit", To: "timestamp of the Kafka record, set by the producer (whole ms)", Floor: stepKafka},
	{Name: "Kafka", From: "that timestamp", To: "the bridge's INSERT begins (column created_at)", Floor: stepKafka},
	{Name: "bridge", From: "created_at", To: "the bridge's log says inserted, after the commit of the mail's row (log)", Floor: stepInsert},
	{Name: "RabbitMQ", From: "that line", To: "the worker's claim begins (changed_at of SENDING)", Floor: stepRabbit},
	{Name: "claim", From: "that changed_at", To: "commit record of SENDING (write-ahead log)", Floor: stepClaim},
	{Name: "store", From: "that commit", To: "commit record of the stored bytes (write-ahead log)"},
	{Name: "connect", From: "that commit", To: "MAIL FROM at the mail server (ledger)"},
	{Name: "250", From: "MAIL FROM", To: "the whole 250 is written (ledger)", Floor: stepSMTP},
	{Name: "mark", From: "the 250", To: "the worker's log says sent, after SENT was committed (log)", Floor: stepMark},
}

var besideTable = []Stage{
	{Name: "answer", From: "intended time of the confirmation", To: "the customer's client has its answer (client)"},
	{Name: "Kafka's ack", From: "commit of the outbox row", To: "the relay marks it published (column published_at)"},
	{Name: "broker's confirm", From: "commit of the mail's row", To: "the bridge stamps it published (column published_at)"},
}

// changeLog collects the committed changes of a system's databases.
type changeLog struct {
	logs []*wal.Collector
	mu   sync.Mutex
	all  []history.Record
}

// followed are the tables that hops are read from.
var followed = map[string][]string{
	"booking": {"public.outbox"},
	"notify":  {"public.notifications", "public.notification_mails"},
}

// follow reads the log from now on. Of the mails it keeps those with these keys:
// a flood writes a hundred times as much as the tickets beside it.
func follow(ctx context.Context, s *system, keys []string) (*changeLog, error) {
	c := &changeLog{}
	mails := followedMails{keys: map[string]bool{}, ids: map[string]bool{}}
	for _, k := range keys {
		mails.keys[k] = true
	}
	for _, db := range s.Databases() {
		log, err := wal.Start(ctx, wal.Config{
			Database: db.Name, URL: db.URL, Tables: followed[db.Name], Drop: []string{"mail", "payload"},
			Sink: func(ch history.Change) error {
				c.mu.Lock()
				defer c.mu.Unlock()
				if !mails.has(ch) {
					return nil
				}
				c.all = append(c.all, history.Record{T: history.Now(), Kind: history.KindChange, Change: &ch})
				return nil
			},
		})
		if err != nil {
			return nil, errors.Join(err, c.stop(ctx))
		}
		c.logs = append(c.logs, log)
	}
	return c, nil
}

// followedMails are the mails whose changes are kept.
type followedMails struct {
	keys map[string]bool
	ids  map[string]bool // of their rows
}

// has reports that a change is one of such a mail's row or of its bytes, or of
// another table. Changes come in the order of their commits: a row's first.
func (f followedMails) has(c history.Change) bool {
	switch c.Table {
	case "public.notifications":
		if !f.keys[c.New["dedupe_key"]] {
			return false
		}
		f.ids[c.New["id"]] = true
	case "public.notification_mails":
		return f.ids[c.New["notification_id"]]
	}
	return true
}

// stop reads on to the end of the log as it is now.
func (c *changeLog) stop(ctx context.Context) error {
	var errs []error
	for _, log := range c.logs {
		errs = append(errs, log.Stop(context.WithoutCancel(ctx)))
	}
	c.logs = nil
	return errors.Join(errs...)
}

// boundaries of one ticket; 0 where there is no evidence.
type boundaries struct {
	committed, produced, inserting, inserted, claiming, claimed, rendered, from, replied, sent int64
	marked, stamped                                                                            int64
}

// path lists where each hop ends, in the order of hopTable.
func (b boundaries) path() []int64 {
	return []int64{b.committed, b.produced, b.inserting, b.inserted, b.claiming, b.claimed, b.rendered, b.from, b.replied, b.sent}
}

// boundariesOf reads the evidence, by dedupe key.
func boundariesOf(h *history.History, r *ticketRun, produced map[string]time.Time) map[string]*boundaries {
	out := make(map[string]*boundaries, len(r.keys))
	byBooking, byRow := map[string]*boundaries{}, map[string]*boundaries{}
	for i, k := range r.keys {
		b := &boundaries{}
		out[k], byBooking[r.tickets[i].Op.booking] = b, b
		if at, ok := produced[k]; ok {
			b.produced = h.Monotonic(at)
		}
		if a, ok := r.mails[k]; ok {
			b.from, b.replied = a.From, a.To
		}
	}
	for _, c := range h.Changes {
		switch c.Table {
		case "public.outbox":
			if b := byBooking[c.New["key"]]; b != nil && c.Database == "booking" {
				b.outbox(h, c)
			}
		case "public.notifications":
			if b := out[c.New["dedupe_key"]]; b != nil {
				byRow[c.New["id"]] = b
				b.row(h, c)
			}
		case "public.notification_mails":
			if b := byRow[c.New["notification_id"]]; b != nil && b.rendered == 0 {
				b.rendered = c.At
			}
		}
	}
	for _, b := range out {
		// Bytes that were stored with the claim cost nothing of their own.
		b.rendered = max(b.rendered, b.claimed)
	}
	return out
}

func (b *boundaries) outbox(h *history.History, c history.Change) {
	if c.Op == "INSERT" {
		b.committed = c.At
		return
	}
	b.marked = columnTime(h, c.New["published_at"])
}

func (b *boundaries) row(h *history.History, c history.Change) {
	status := c.New["status"]
	switch {
	case c.Op == "INSERT":
		b.inserting, b.inserted = columnTime(h, c.New["created_at"]), c.At
	case status == "SENDING" && b.claimed == 0:
		b.claiming, b.claimed = columnTime(h, c.New["changed_at"]), c.At
	}
	if b.stamped == 0 {
		b.stamped = columnTime(h, c.New["published_at"])
	}
}

// logKey is a line of a service's log: a mail's key and what was said of it.
type logKey struct{ key, said string }

// readLogs reads when the services said something of a mail for the first time.
// What follows a commit in the same goroutine is logged after the commit was
// answered, so its flush is in.
func readLogs(s *system) (map[logKey]time.Time, error) {
	out := map[logKey]time.Time{}
	for _, p := range s.Processes() {
		if err := readLog(p.Log(), out); err != nil {
			return nil, fmt.Errorf("log of %s: %w", p.Name(), err)
		}
	}
	return out, nil
}

func readLog(path string, into map[logKey]time.Time) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var l struct {
			Time time.Time `json:"time"`
			Msg  string    `json:"msg"`
			Key  string    `json:"dedupe_key"`
		}
		if json.Unmarshal(lines.Bytes(), &l) != nil || l.Key == "" {
			continue
		}
		if _, known := into[logKey{l.Key, l.Msg}]; !known {
			into[logKey{l.Key, l.Msg}] = l.Time
		}
	}
	return lines.Err()
}

// columnTime reads a timestamptz as the write-ahead log prints it.
func columnTime(h *history.History, text string) int64 {
	if text == "" {
		return 0
	}
	t, err := time.Parse("2006-01-02 15:04:05.999999Z07", text)
	if err != nil {
		return 0
	}
	return h.Monotonic(t)
}

// hopRepeat is the tickets of one repeat, and where their time went.
type hopRepeat struct {
	hops, beside []Samples
	total        Samples
	unplaced     int
	perSecond    float64 // marketing mails delivered meanwhile
}

// measureHops sends tickets through a system and reads their way from the
// evidence. The system is idle but for a flood of marketing mails, if there are
// any.
func (r *runner) measureHops(ctx context.Context, s *system, warm, counted schedule, flood int) (hopRepeat, error) {
	var out hopRepeat
	if err := book(ctx, s, append(warm[:len(warm):len(warm)], counted...)); err != nil {
		return out, err
	}
	clock := newWallClock()
	if err := confirm(ctx, s, warm).await(ctx, s, clock); err != nil {
		return out, err
	}
	release := history.Now
	if flood > 0 {
		var err error
		if release, err = s.queueFlood(ctx, flood); err != nil {
			return out, err
		}
	}
	log, err := follow(ctx, s, keysOf(s, counted))
	if err != nil {
		release()
		return out, err
	}
	clock.mark()
	from := release()
	run := confirm(ctx, s, counted)
	clock.mark()
	bounded, cancel := context.WithTimeout(ctx, r.size.ticketBound)
	defer cancel()
	err = run.await(bounded, s, clock)
	s.readLedger()
	out.perSecond = perSecond(s.marketing, from, run.end())
	if err := errors.Join(err, log.stop(ctx)); err != nil {
		return out, err
	}
	return out, out.read(ctx, s, run, clock, log)
}

// read takes the way of each ticket from what was collected.
func (o *hopRepeat) read(ctx context.Context, s *system, run *ticketRun, clock *wallClock, log *changeLog) error {
	produced, err := s.Produced(ctx)
	if err != nil {
		return err
	}
	h := history.FromRecords(append(clock.pairs, log.all...))
	if len(h.Problems) > 0 {
		return fmt.Errorf("the write-ahead log: %w", h.Problems[0].Err)
	}
	logged, err := readLogs(s)
	if err != nil {
		return err
	}
	all := boundariesOf(h, run, produced)
	for k, b := range all {
		if at, ok := logged[logKey{k, "sent"}]; ok {
			b.sent = h.Monotonic(at)
		}
		// Where the row is not logged one by one its commit record stands in.
		if at, ok := logged[logKey{k, "event"}]; ok && b.inserted > 0 {
			b.inserted = h.Monotonic(at)
		}
	}
	o.fill(run, all)
	return nil
}

func (o *hopRepeat) fill(r *ticketRun, all map[string]*boundaries) {
	o.hops, o.beside = make([]Samples, len(hopTable)), make([]Samples, len(besideTable))
	for i, k := range r.keys {
		b := all[k]
		if b.sent == 0 {
			o.total.Missing++
			continue
		}
		o.total.add(time.Duration(b.sent - r.intended[i]))
		path := b.path()
		if missing(path) {
			o.unplaced++
			continue
		}
		at := r.intended[i]
		for j, to := range path {
			// A record's whole milliseconds can lie before the commit that it
			// follows.
			to = max(to, at)
			o.hops[j].add(time.Duration(to - at))
			at = to
		}
		o.addBeside(0, r.intended[i], r.answered[i])
		o.addBeside(1, b.committed, b.marked)
		o.addBeside(2, b.inserted, b.stamped)
	}
}

func (o *hopRepeat) addBeside(i int, from, to int64) {
	if from > 0 && to > 0 {
		o.beside[i].add(time.Duration(max(0, to-from)))
	}
}

func missing(path []int64) bool {
	for _, t := range path {
		if t == 0 {
			return true
		}
	}
	return false
}

// newWay has no samples yet.
func newWay() Way { return Way{Hops: clone(hopTable), Beside: clone(besideTable)} }

// add appends one repeat. The error says that too many tickets cannot be
// followed; they are appended all the same.
func (w *Way) add(rep hopRepeat) error {
	for j := range w.Hops {
		w.Hops[j].Repeats = append(w.Hops[j].Repeats, rep.hops[j])
	}
	for j := range w.Beside {
		w.Beside[j].Repeats = append(w.Beside[j].Repeats, rep.beside[j])
	}
	w.Total = append(w.Total, rep.total)
	w.Unplaced += rep.unplaced
	if rep.unplaced > len(rep.total.Micros)/10 {
		return fmt.Errorf("%d of %d tickets cannot be followed: the evidence of a hop is missing", rep.unplaced, len(rep.total.Micros))
	}
	return nil
}

// hopsPart measures floor and system in turn, repeat by repeat, then the system
// under the flood.
func (r *runner) hopsPart(ctx context.Context) error {
	out := &Hops{PerSecond: r.size.ticketRate, Way: newWay()}
	r.result.Hops = out
	for i := range r.size.repeats {
		arrivals, err := drawTickets(r.cfg.Seed, fmt.Sprintf("hops%d", i), r.size.idleTickets, r.size.ticketRate)
		if err != nil {
			return err
		}
		r.say("hops: serial floor, %d of %d", i+1, r.size.repeats)
		if err := r.floorRepeat(ctx, out, arrivals); err != nil {
			return err
		}
		r.say("hops: tickets through the idle system, %d of %d", i+1, r.size.repeats)
		rep, err := r.hopRepeat(ctx, "hops", arrivals, 0)
		if err != nil {
			return err
		}
		if err := out.add(rep); err != nil {
			return err
		}
	}
	return r.floodedHops(ctx, out)
}

func (r *runner) floodedHops(ctx context.Context, out *Hops) error {
	flooded := &FloodedHops{Flood: r.size.flood, Way: newWay()}
	for i := range r.size.floodedHops {
		arrivals, err := drawTickets(r.cfg.Seed, fmt.Sprintf("floodedhops%d", i), r.size.floodTickets, r.size.ticketRate)
		if err != nil {
			return err
		}
		r.say("hops: tickets behind %d marketing mails, %d of %d", r.size.flood, i+1, r.size.floodedHops)
		rep, err := r.hopRepeat(ctx, "flooded", arrivals, r.size.flood)
		if err != nil {
			return err
		}
		flooded.MarketingPerSecond = append(flooded.MarketingPerSecond, rep.perSecond)
		out.Flooded = flooded
		if err := flooded.add(rep); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) floorRepeat(ctx context.Context, out *Hops, arrivals schedule) error {
	s, err := r.lab.startSerial(ctx)
	if err != nil {
		return err
	}
	steps, total, err := s.run(ctx, arrivals)
	if err := errors.Join(err, s.stop(ctx)); err != nil {
		return err
	}
	if out.Floor == nil {
		for _, step := range s.steps() {
			out.Floor = append(out.Floor, Stage{Name: step.name, From: "the step before", To: step.what})
		}
	}
	for i := range steps {
		out.Floor[i].Repeats = append(out.Floor[i].Repeats, steps[i])
	}
	out.FloorTotal = append(out.FloorTotal, total)
	return nil
}

// hopRepeat is one measurement on a system of its own.
func (r *runner) hopRepeat(ctx context.Context, what string, arrivals schedule, flood int) (hopRepeat, error) {
	warm, err := drawTickets(r.cfg.Seed, "warm", warmUp, r.size.ticketRate)
	if err != nil {
		return hopRepeat{}, err
	}
	c := systemConfig{what: what}
	if flood > 0 {
		c.env = patientEnv()
	}
	s, err := r.lab.start(ctx, c)
	if err != nil {
		return hopRepeat{}, err
	}
	rep, err := r.measureHops(ctx, s, warm, arrivals, flood)
	return rep, errors.Join(err, s.stop(ctx))
}

func clone(stages []Stage) []Stage {
	out := make([]Stage, len(stages))
	copy(out, stages)
	return out
}
