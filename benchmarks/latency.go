package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"mailproof/mutants"
	"mailproof/target"
)

// variant is a layout to measure.
type variant struct {
	name, title string
	mutant      string // the defect that makes the system so; "" is the system as it ships
	env         map[string]string
	repeats     int
	idle        bool // measured without a flood too, on the same system
}

// variants in the order of the table.
func (r *runner) variants() []variant {
	all := []variant{
		{name: layoutSplit, title: "split: a queue and a pool for each lane (as it ships)", repeats: r.size.splitRepeats, idle: true},
		{name: layoutOnePool, title: "one pool of connections for both, no bucket", mutant: layoutOnePool, repeats: r.size.otherRepeats},
		{name: layoutOneQueue, title: "naive: one queue, one pool", mutant: layoutOneQueue, repeats: 1},
	}
	if !r.cfg.Quick {
		all = append(all, variant{
			name: layoutBucket, title: "split, with a token bucket of " + bucketRate + " mails/s",
			env: map[string]string{"NOTIFYD_MARKETING_RATE": bucketRate}, repeats: r.size.otherRepeats,
		})
	}
	return all
}

// latencyPart measures tickets idle and under the flood, layout by layout.
func (r *runner) latencyPart(ctx context.Context) error {
	r.result.Latency = &Latency{Flood: r.size.flood, PerSecond: r.size.ticketRate}
	var errs []error
	for _, v := range r.variants() {
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		// A layout that fails costs its own line only.
		if err := r.measureLayout(ctx, v); err != nil {
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
		s, err := r.lab.start(ctx, systemConfig{what: v.name, binaries: bins, env: env})
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
	if v.idle {
		r.say("latency: idle tickets, %d of %d", i+1, v.repeats)
		keep := func(rep LatencyRepeat) { r.addLayout(layoutIdle, "idle (split)", rep) }
		if err := r.quietTickets(ctx, s, fmt.Sprintf("idle%d", i), r.size.idleTickets, clock, keep); err != nil {
			return err
		}
	}
	r.say("latency: tickets behind %d marketing mails, %s, %d of %d", r.size.flood, v.name, i+1, v.repeats)
	rep, err := r.floodedTickets(ctx, s, fmt.Sprintf("flood%d", i), clock)
	if err != nil {
		return err
	}
	r.addLayout(v.name, v.title, rep)
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
func (r *runner) floodedTickets(ctx context.Context, s *system, who string, clock *wallClock) (LatencyRepeat, error) {
	var out LatencyRepeat
	all, err := drawTickets(r.cfg.Seed, who, r.size.floodTickets, r.size.ticketRate)
	if err != nil {
		return out, err
	}
	if err := book(ctx, s, all); err != nil {
		return out, err
	}
	release, err := s.holdMarketing()
	if err != nil {
		return out, err
	}
	if _, err := s.campaign(ctx, r.size.flood); err != nil {
		release()
		return out, err
	}
	from := release()
	run := confirm(ctx, s, all)
	clock.mark()
	bounded, cancel := context.WithTimeout(ctx, r.size.ticketBound)
	defer cancel()
	if err := run.await(bounded, s, clock); err != nil {
		return out, err
	}
	if err := context.Cause(ctx); err != nil {
		return out, err
	}
	s.readLedger()
	to := run.intended[len(run.intended)-1]
	for _, a := range run.mails {
		to = max(to, a.StoredAt)
	}
	out = run.latency()
	out.Queue = queueOverTime(r.size.flood, s.marketing, from, to, 100)
	out.MarketingPerSecond = perSecond(s.marketing, from, to)
	return out, nil
}

// addLayout adds one repeat to the layout of this name.
func (r *runner) addLayout(name, title string, rep LatencyRepeat) {
	l := r.result.Latency
	i := slices.IndexFunc(l.Layouts, func(x Layout) bool { return x.Name == name })
	if i < 0 {
		l.Layouts = append(l.Layouts, Layout{Name: name, Title: title})
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
