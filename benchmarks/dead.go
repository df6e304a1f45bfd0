package benchmarks

import (
	"context"
	"errors"
	"strings"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/loadgen"
)

const (
	// idleStretch is how long the CPU of an idle system is watched.
	idleStretch = 4 * time.Second
	// deadSlack is how long beyond the sum of delays the last dead letter is
	// waited for.
	deadSlack = 20 * time.Second
)

// deadPart sends tickets to a mail server that refuses every recipient.
func (r *runner) deadPart(ctx context.Context) error {
	out := &Dead{Mails: r.size.deadTickets}
	var sum time.Duration
	for _, d := range r.size.deadDelays {
		out.DelaysMillis = append(out.DelaysMillis, d.Milliseconds())
		sum += d
	}
	all, err := drawTickets(r.cfg.Seed, "dead", r.size.deadTickets, 2*r.size.ticketRate)
	if err != nil {
		return err
	}
	s, err := r.lab.start(ctx, systemConfig{
		what: "dead", delays: r.size.deadDelays, attempts: len(r.size.deadDelays) + 1,
		rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).Rule()},
	})
	if err != nil {
		return err
	}
	err = r.measureDead(ctx, s, all, sum, out)
	return errors.Join(err, s.stop(ctx))
}

func (r *runner) measureDead(ctx context.Context, s *system, all schedule, sum time.Duration, out *Dead) error {
	if err := book(ctx, s, all); err != nil {
		return err
	}
	r.say("dead: CPU of the idle system")
	cpu := s.cpu()
	before, began := cpu.read(), time.Now()
	if !loadgen.Wait(ctx, idleStretch) {
		return context.Cause(ctx)
	}
	out.IdleCPU = percent(cpu.since(before)[partNotifyd], time.Since(began))

	r.say("dead: %d tickets, every recipient refused, delays of %s together", len(all), sum)
	clock := newWallClock()
	before, began = cpu.read(), time.Now()
	run := confirm(ctx, s, all)
	bounded, cancel := context.WithTimeout(ctx, sum+deadSlack)
	defer cancel()
	var dead map[string]time.Time
	err := await(bounded, 200*time.Millisecond, func() (done bool, err error) {
		dead, err = s.DeadAt(ctx)
		return len(dead) >= len(all), err
	})
	if err != nil && ctx.Err() != nil {
		return err
	}
	out.DownCPU = percent(cpu.since(before)[partNotifyd], time.Since(began))
	clock.mark()
	r.result.Dead = out
	return r.countDead(ctx, s, run, dead, clock, out)
}

func (r *runner) countDead(ctx context.Context, s *system, run *ticketRun, dead map[string]time.Time, clock *wallClock, out *Dead) error {
	first := map[string]int64{} // recipient → end of the first try
	for _, a := range s.mail.Ledger() {
		out.Tries++
		if at, known := first[a.Recipient]; !known || a.To < at {
			first[a.Recipient] = a.To
		}
	}
	out.DeadLetters = len(dead)
	for _, t := range run.tickets {
		at, ok := dead[t.Op.recipient]
		from := first[t.Op.recipient]
		if !ok || from == 0 {
			out.ToDLQ.Missing++
			continue
		}
		out.ToDLQ.add(time.Duration(clock.mono(at) - from))
	}
	counters, err := s.Counters(ctx)
	if err != nil {
		return err
	}
	for name, n := range counters {
		if strings.Contains(name, "deliveries_total") && strings.Contains(name, `redelivered="true"`) {
			out.Redeliveries += n
		}
	}
	return nil
}

// percent of one core.
func percent(cpuSeconds float64, wall time.Duration) float64 {
	return 100 * cpuSeconds / wall.Seconds()
}
