package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mailproof/fakes/ledger"
	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/infra"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
	"mailproof/target"
)

// stopBound is how long a stop may take, also after an interrupt.
const stopBound = time.Minute

// lab is the real parts, started once, and what each measurement has of its own
// on them.
type lab struct {
	stack  infra.Stack
	logDir string
	opened int
	builds string // folder of binaries that were built for the run
	bins   target.Binaries
	built  map[string]target.Binaries // by the defect that is planted
}

// startLab starts Postgres, three RabbitMQ nodes and Kafka. On an error nothing
// is left running.
func startLab(ctx context.Context, logDir string, say func(part, state string)) (*lab, error) {
	bins, ok := target.Beside()
	// Beside the logs: a run that is left at once (a second Ctrl-C) leaves them
	// where its user looks.
	if err := os.MkdirAll(logDir, 0o755); err != nil {
		return nil, fmt.Errorf("a folder for logs: %w", err)
	}
	builds, err := os.MkdirTemp(logDir, "built-")
	if err != nil {
		return nil, fmt.Errorf("a folder for the system's binaries: %w", err)
	}
	l := &lab{logDir: logDir, builds: builds, bins: bins, built: map[string]target.Binaries{}}
	if !ok {
		if l.bins, err = target.Build(ctx, target.BuildConfig{Dir: builds}); err != nil {
			return nil, errors.Join(broken(ctx, err), os.RemoveAll(builds))
		}
	}
	l.stack, err = processes.New(setup.Locate()).Start(ctx, infra.Spec{LogDir: filepath.Join(logDir, "nodes"), Progress: say})
	if err != nil {
		return nil, errors.Join(broken(ctx, err), os.RemoveAll(builds))
	}
	return l, nil
}

// broken says why nothing started: an interrupt shows as whatever it broke off.
func broken(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

func (l *lab) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
	defer cancel()
	return errors.Join(l.stack.Stop(ctx), os.RemoveAll(l.builds))
}

// name of the next user of the parts, unlike all others.
func (l *lab) name(what string) string {
	l.opened++
	return fmt.Sprintf("b%d_%s", l.opened, strings.ReplaceAll(what, "-", "_"))
}

// cpu reads the CPU time of the shared parts.
func (l *lab) cpu() cpuClock {
	roots := map[string][]int{
		partPostgres: {l.stack.Postgres().PID()},
		partKafka:    {l.stack.Kafka().PID()},
	}
	for _, n := range l.stack.RabbitMQ().Nodes() {
		roots[partRabbit] = append(roots[partRabbit], n.PID())
	}
	return cpuClock{roots}
}

// system is one pipeline with a mail server of its own.
type system struct {
	*target.Pipeline
	lab  *lab
	mail *smtp.Server

	// What readLedger has seen: tickets that were kept, by key, and when each
	// marketing mail was.
	read      int64
	kept      map[string]ledger.Attempt
	marketing []int64
}

// readLedger reads the rows that finished since the last call: a flood's ledger
// must not be read as a whole while tickets are measured beside it.
func (s *system) readLedger() {
	for _, a := range s.mail.LedgerSince(s.read) {
		s.read = a.Seq
		switch {
		case !a.Stored:
		case strings.HasSuffix(a.Recipient, campaignDomain):
			s.marketing = append(s.marketing, a.StoredAt)
		default:
			s.kept[a.Key] = a
		}
	}
}

// systemConfig of one measurement; the zero value is the system as it ships.
type systemConfig struct {
	what     string // a word for its names and logs
	env      map[string]string
	binaries target.Binaries // "" are the lab's
	rules    []smtp.Rule
	delays   []time.Duration
	attempts int
}

// start starts the system under test beside a mail server that does what rules
// say.
func (l *lab) start(ctx context.Context, c systemConfig) (_ *system, err error) {
	name := l.name(c.what)
	s := &system{lab: l, kept: map[string]ledger.Attempt{}}
	if s.mail, err = smtp.Start(smtp.Options{Clock: history.Now, Rules: c.rules}); err != nil {
		return nil, err
	}
	bins := c.binaries
	if bins == (target.Binaries{}) {
		bins = l.bins
	}
	s.Pipeline, err = target.StartPipeline(ctx, target.PipelineConfig{
		Stack: l.stack, Name: name, SMTPAddr: s.mail.Addr(), LogDir: filepath.Join(l.logDir, name), Binaries: bins,
		Env: c.env, RetryDelays: c.delays, MaxAttempts: c.attempts, Policy: "resend",
	})
	if err != nil {
		return nil, errors.Join(err, s.mail.Close())
	}
	return s, nil
}

// stop ends it and removes what it had on the parts.
func (s *system) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
	defer cancel()
	return errors.Join(s.Pipeline.Stop(ctx), s.mail.Close())
}

// cpu reads the CPU time of the system's processes too.
func (s *system) cpu() cpuClock {
	parts := map[string][]int{}
	for _, p := range s.Processes() {
		kind, _, _ := strings.Cut(p.Name(), "-")
		parts[kind] = append(parts[kind], p.PID())
	}
	return s.lab.cpu().with(parts)
}

// await asks again every so often until done says yes, or ctx ends.
func await(ctx context.Context, every time.Duration, done func() (bool, error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
