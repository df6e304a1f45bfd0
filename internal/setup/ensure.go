package setup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// ErrMissing is returned when parts are missing that a run cannot do without,
// and they were not installed. Its text holds the commands for a person.
var ErrMissing = errors.New("parts are missing")

// Options of [Ensure].
type Options struct {
	// Yes agrees to everything. So do YES=1 and CI=true in the environment.
	Yes bool
	// In is asked when it is a terminal; nil is standard input.
	In io.Reader
	// Out is told what is to be done and what happens; nil is standard output.
	Out io.Writer
}

// Ensure looks for what a run needs, and installs what is missing after it was
// agreed to. It says nothing when nothing is missing. When only Kafka is missing
// and a person declines, it says that kfake will stand in, and returns nil.
func Ensure(ctx context.Context, o Options) error {
	if o.In == nil {
		o.In = os.Stdin
	}
	if o.Out == nil {
		o.Out = os.Stdout
	}
	items := Check(ctx)
	m := thisMachine()
	p := m.plan(ctx, items)
	if p.Empty() {
		return nil
	}
	fmt.Fprintln(o.Out, p)
	if p.Refused != "" {
		return p.leave(o.Out, p.Refused)
	}
	switch o.agreed() {
	case declined:
		return p.leave(o.Out, "declined")
	case unasked:
		return fmt.Errorf("%w; there is no terminal to ask, and neither YES=1 nor CI=true is set. By hand:\n%s", ErrMissing, p.commands())
	}
	return m.apply(ctx, p, o.Out)
}

// apply does what the plan says.
func (m *machine) apply(ctx context.Context, p Plan, out io.Writer) error {
	if len(p.Packages) > 0 {
		i := &installation{machine: m, sudo: p.sudo, out: out}
		if err := i.install(ctx, p.Packages); err != nil {
			return fmt.Errorf("install %s: %w", strings.Join(p.Packages, " "), err)
		}
	}
	paths := Locate()
	if p.FetchJars {
		dir, err := KafkaDir()
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "fetching the jars of Kafka %s\n", KafkaVersion)
		if err := fetchKafka(ctx, paths.Maven, dir, out); err != nil {
			return err
		}
	}
	return m.confirm(ctx, out)
}

// confirm looks again: a package of an older system may be too old.
func (m *machine) confirm(ctx context.Context, out io.Writer) error {
	p := m.plan(ctx, Check(ctx))
	if p.Empty() {
		fmt.Fprintln(out, "Everything is there.")
		return nil
	}
	fmt.Fprintln(out, p)
	return p.leave(out, "still missing after the installation")
}

// leave ends without an installation: an error unless a run can do without.
func (p Plan) leave(out io.Writer, why string) error {
	if p.OnlyOptional() {
		fmt.Fprintf(out, "Not installed (%s): kfake, inside this process, stands in for Kafka, and every report says so. For the real one:\n%s\n", why, p.commands())
		return nil
	}
	return fmt.Errorf("%w (%s). By hand:\n%s", ErrMissing, why, p.commands())
}

func (p Plan) commands() string { return "  " + strings.Join(p.Commands, "\n  ") }

type answer int

const (
	unasked answer = iota
	declined
	agreed
)

// agreed asks if somebody is there to answer. No answer is a no.
func (o Options) agreed() answer {
	if o.Yes || os.Getenv("YES") == "1" || os.Getenv("CI") == "true" {
		return agreed
	}
	f, ok := o.In.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return unasked
	}
	fmt.Fprint(o.Out, "Go ahead? [y/N] ")
	line, _ := bufio.NewReader(o.In).ReadString('\n') // an error leaves the line empty
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return agreed
	}
	return declined
}
