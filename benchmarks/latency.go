package benchmarks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/mutants"
	"mailproof/target"
)

// variant is a layout to measure.
type variant struct {
	name, title string
	mutant      string // the defect that makes the system so; "" is the system as it ships
	env         map[string]string
	repeats     int
	flood       int           // marketing mails
	idle        string        // name of the layout that it is without a flood, measured on the same system; "": not measured
	mailTime    time.Duration // that the mail server takes for each mail
	behind      bool          // tickets wait behind the whole flood
}

const (
	splitTitle   = "split: a queue and a pool for each lane, a token bucket on marketing (as it ships)"
	onePoolTitle = "one pool of connections for both, no bucket"
)

// variants in the order of the table.
func (s size) variants() []variant {
	all := []variant{
		{name: layoutSplit, title: splitTitle, repeats: s.splitRepeats, flood: s.flood, idle: layoutIdle},
		{name: layoutNoBucket, title: "split, no bucket", env: noBucket(), repeats: s.otherRepeats, flood: s.flood},
		{name: layoutOnePool, title: onePoolTitle, mutant: layoutOnePool, repeats: s.otherRepeats, flood: s.flood},
		{name: layoutOneQueue, title: "naive: one queue, one pool, no bucket", mutant: layoutOneQueue, env: noBucket(), repeats: 1, flood: s.flood, behind: true},
	}
	many := map[string]string{"NOTIFYD_MARKETING_PARALLEL": strconv.Itoa(slowParallel)}
	return append(all,
		variant{
			name: layoutSlowSplit, title: splitTitle, repeats: s.slowRepeats, flood: s.slowFlood, idle: layoutSlowIdle,
			mailTime: slowMail, env: many,
		},
		variant{
			name: layoutSlowOnePool, title: onePoolTitle, mutant: layoutOnePool, repeats: s.slowRepeats, flood: s.slowFlood,
			mailTime: slowMail, env: many,
		},
	)
}

// rules of the mail server.
func (v variant) rules() []smtp.Rule {
	if v.mailTime == 0 {
		return nil
	}
	return []smtp.Rule{smtp.On(smtp.StageDot, script.Delay).For(v.mailTime).Rule()}
}

// latencyPart measures tickets idle and under the flood, layout by layout.
func (r *runner) latencyPart(ctx context.Context) error {
	r.result.Latency = &Latency{
		Flood: r.size.flood, PerSecond: r.size.ticketRate, SlowFlood: r.size.slowFlood, SlowParallel: slowParallel * marketingConsumers,
	}
	// Built before anything is measured: the compiler takes no core from a
	// measurement. A layout that cannot be built says so when its turn comes.
	for _, v := range r.size.variants() {
		_, _ = r.lab.build(ctx, v.mutant)
	}
	var errs []error
	for _, v := range r.size.variants() {
		if ctx.Err() != nil {
			return cmp.Or(errors.Join(errs...), context.Cause(ctx))
		}
		// A layout that fails costs its own line only.
		if err := r.measureLayout(ctx, v); err != nil {
			if ctx.Err() == nil {
				r.say("latency: %s failed: %v", v.name, err)
			}
			errs = append(errs, fmt.Errorf("%s: %w", v.name, err))
		}
	}
	return errors.Join(errs...)
}

func (r *runner) measureLayout(ctx context.Context, v variant) error {
	bins, err := r.lab.build(ctx, v.mutant)
	if err != nil {
		return err
	}
	for i := range v.repeats {
		env := patientEnv()
		maps.Copy(env, v.env)
		s, err := r.lab.start(ctx, systemConfig{what: v.name, binaries: bins, env: env, rules: v.rules()})
		if err != nil {
			return err
		}
		err = r.measureLayoutOnce(ctx, s, v, i)
		if err := errors.Join(err, s.stop(ctx)); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) measureLayoutOnce(ctx context.Context, s *system, v variant, i int) error {
	clock := newWallClock()
	if err := r.quietTickets(ctx, s, "warm", warmUp, clock, nil); err != nil {
		return err
	}
	if v.idle != "" {
		r.say("latency: tickets, %s, %d of %d", v.idle, i+1, v.repeats)
		keep := func(rep LatencyRepeat) { r.addLayout(v.idle, "idle (split)", v.mailTime, rep) }
		if err := r.quietTickets(ctx, s, fmt.Sprintf("idle%d", i), r.size.idleTickets, clock, keep); err != nil {
			return err
		}
	}
	r.say("latency: tickets behind %d marketing mails, %s, %d of %d", v.flood, v.name, i+1, v.repeats)
	rep, err := r.floodedTickets(ctx, s, fmt.Sprintf("flood%d", i), v, clock)
	if err != nil {
		return err
	}
	r.addLayout(v.name, v.title, v.mailTime, rep)
	return nil
}

// quietTickets sends tickets through a system that has nothing else to do.
func (r *runner) quietTickets(ctx context.Context, s *system, who string, n int, clock *wallClock, keep func(LatencyRepeat)) error {
	all, err := drawTickets(r.cfg.Seed, who, n, r.size.ticketRate)
	if err != nil {
		return err
	}
	if err := book(ctx, s, all); err != nil {
		return err
	}
	run := confirm(ctx, s, all)
	clock.mark()
	bounded, cancel := context.WithTimeout(ctx, r.size.ticketBound)
	defer cancel()
	if err := run.await(bounded, s, clock); err != nil {
		return err
	}
	if ctx.Err() == nil && keep != nil {
		keep(run.latency())
	}
	return context.Cause(ctx)
}

// floodedTickets queues the whole flood, lets it go, and confirms tickets from
// that moment on.
func (r *runner) floodedTickets(ctx context.Context, s *system, who string, v variant, clock *wallClock) (LatencyRepeat, error) {
	var out LatencyRepeat
	all, err := drawTickets(r.cfg.Seed, who, r.size.floodTickets, r.size.ticketRate)
	if err != nil {
		return out, err
	}
	if err := book(ctx, s, all); err != nil {
		return out, err
	}
	release, err := s.queueFlood(ctx, v.flood)
	if err != nil {
		return out, err
	}
	from := release()
	run := confirm(ctx, s, all)
	clock.mark()
	bounded, cancel := context.WithTimeout(ctx, v.bound(r.size))
	defer cancel()
	if err := run.await(bounded, s, clock); err != nil {
		return out, err
	}
	if err := context.Cause(ctx); err != nil {
		return out, err
	}
	s.readLedger()
	to := run.end()
	out = run.latency()
	out.Queue = queueOverTime(v.flood, s.marketing, from, to, 100)
	out.MarketingPerSecond = perSecond(s.marketing, from, to)
	return out, nil
}

// addLayout adds one repeat to the layout of this name.
func (r *runner) addLayout(name, title string, mailTime time.Duration, rep LatencyRepeat) {
	l := r.result.Latency
	i := slices.IndexFunc(l.Layouts, func(x Layout) bool { return x.Name == name })
	if i < 0 {
		l.Layouts = append(l.Layouts, Layout{Name: name, Title: title, MailMillis: mailTime.Milliseconds()})
		i = len(l.Layouts) - 1
	}
	l.Layouts[i].Repeats = append(l.Layouts[i].Repeats, rep)
}

// build builds the system with a known defect planted; "" is the system as it
// ships.
func (l *lab) build(ctx context.Context, mutant string) (target.Binaries, error) {
	if mutant == "" {
		return l.bins, nil
	}
	if b, ok := l.built[mutant]; ok {
		return b, nil
	}
	m, err := findMutant(mutant)
	if err != nil {
		return target.Binaries{}, err
	}
	work := filepath.Join(l.builds, mutant)
	if err := os.MkdirAll(work, 0o755); err != nil {
		return target.Binaries{}, err
	}
	overlay, err := m.Overlay(".", work)
	if err != nil {
		return target.Binaries{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, buildBound)
	defer cancel()
	b, err := target.Build(ctx, target.BuildConfig{Dir: filepath.Join(work, "bin"), Overlay: overlay})
	if err == nil {
		l.built[mutant] = b
	}
	return b, err
}

// findMutant looks among the planted defects.
func findMutant(name string) (mutants.Mutant, error) {
	all, err := mutants.All()
	if err != nil {
		return mutants.Mutant{}, err
	}
	i := slices.IndexFunc(all, func(m mutants.Mutant) bool { return m.Name == name })
	if i < 0 {
		return mutants.Mutant{}, fmt.Errorf("no planted defect is called %q", name)
	}
	return all[i], nil
}

// buildBound is how long a build of a layout may take.
const buildBound = 2 * time.Minute
