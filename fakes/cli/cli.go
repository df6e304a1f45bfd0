// Package cli holds the commands of the fakes, for whichever binary wants
// them: "fake smtp", "judge", "demo". It imports nothing of this module but
// the packages of fakes/.
package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"mailproof/fakes/demo"
	"mailproof/fakes/judge"
	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

// Verdict is an error that carries an exit code; what there was to say has
// been printed.
type Verdict struct {
	Code int
	Text string
}

func (v Verdict) Error() string { return v.Text }

// ExitCode is 1 for a failed judgement and 3 for one with nothing to judge.
func (v Verdict) ExitCode() int { return v.Code }

// Commands returns new command trees.
func Commands() []*cobra.Command {
	fake := &cobra.Command{
		Use: "fake", Short: "Servers that misbehave on purpose",
		// With neither, a name that does not exist prints the help and succeeds.
		Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	fake.AddCommand(smtpCommand(), resendCommand())
	return []*cobra.Command{fake, judgeCommand(), demoCommand()}
}

type smtpFlags struct {
	opt    smtp.Options
	mode   string
	rules  string
	ledger string
	users  []string
	tls    bool
}

func smtpCommand() *cobra.Command {
	var f smtpFlags
	c := &cobra.Command{
		Use:   "smtp",
		Short: "An SMTP server with scripted faults, a ledger and a page",
		Long: `Runs until it is interrupted. Faults come from a rules file, from the control
API (POST /rules), from the page, or from the recipient's address:
ann+fault-rcpt-451@example.com, ann+fault-stored-drop-x1@example.com.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c.Context(), c.OutOrStdout()) },
	}
	fl := c.Flags()
	fl.StringVar(&f.opt.Addr, "smtp", "127.0.0.1:1025", "address for SMTP")
	fl.StringVar(&f.opt.HTTPAddr, "http", "127.0.0.1:8025", "address of the page and the control API, empty for none")
	fl.Uint64Var(&f.opt.Seed, "seed", 1, "seed of every draw")
	fl.StringVar(&f.rules, "rules", "", "file with rules as JSON")
	fl.StringVar(&f.mode, "mode", string(smtp.Plain), "plain, dedup-key or dedup-message-id")
	fl.StringVar(&f.opt.KeyHeader, "key-header", "X-Dedupe-Key", "header that carries the dedupe key")
	fl.StringVar(&f.ledger, "ledger", "", "file to which each finished row is appended as a JSON line")
	fl.StringArrayVar(&f.users, "user", nil, "name:password that AUTH accepts, may be repeated; none accepts anybody")
	fl.BoolVar(&f.tls, "tls", false, "offer STARTTLS with a self-signed certificate")
	fl.Int64Var(&f.opt.MaxMessageBytes, "max-size", 32<<20, "largest mail in bytes")
	fl.IntVar(&f.opt.MaxConnections, "max-connections", 4096, "connections at once")
	fl.IntVar(&f.opt.MaxRecipients, "max-recipients", 100, "recipients of one mail")
	fl.StringVar(&f.opt.BodyDir, "bodies", "", "folder that gets each stored mail whole, as ID.eml")
	fl.Int64Var(&f.opt.KeepBodies, "keep-bodies", 32<<20, "bytes of mails kept to look at")
	return c
}

func (f *smtpFlags) options() (smtp.Options, error) {
	opt := f.opt
	opt.Mode = smtp.Mode(f.mode)
	var err error
	if opt.Rules, err = readRules(f.rules); err != nil {
		return opt, err
	}
	for _, u := range f.users {
		name, pass, ok := strings.Cut(u, ":")
		if !ok {
			return opt, fmt.Errorf("--user %q: want name:password", u)
		}
		if opt.Users == nil {
			opt.Users = map[string]string{}
		}
		opt.Users[name] = pass
	}
	if !f.tls {
		return opt, nil
	}
	conf, _, err := smtp.SelfSigned()
	opt.TLS = conf
	return opt, err
}

// readRules reads a file of rules; "" means none.
func readRules(name string) ([]script.Rule, error) {
	if name == "" {
		return nil, nil
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	rules, err := script.ParseRules(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return rules, nil
}

func (f *smtpFlags) run(ctx context.Context, out io.Writer) (err error) {
	opt, err := f.options()
	if err != nil {
		return err
	}
	srv, err := smtp.Start(opt)
	if err != nil {
		return taken(err, "--smtp and --http choose other addresses")
	}
	export, err := export(srv, f.ledger)
	if err != nil {
		return errors.Join(err, srv.Close())
	}
	fmt.Fprintf(out, "smtp    %s\n", srv.Addr())
	if srv.URL() != "" {
		fmt.Fprintf(out, "page    %s/\n", srv.URL())
	}
	fmt.Fprintf(out, "seed    %d, mode %s, %d rules\n", opt.Seed, opt.Mode, len(opt.Rules))
	select {
	case <-ctx.Done():
	case err = <-export.failed:
	}
	closed := srv.Close()
	return errors.Join(err, closed, export.close())
}

// taken adds what to do to the error of an address that is in use.
func taken(err error, do string) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w; %s", err, do)
	}
	return err
}

// exporter appends finished rows to a file.
type exporter struct {
	failed chan error
	stop   context.CancelFunc
	done   chan struct{}
	rest   func() error
}

// source is a fake whose rows are exported.
type source interface {
	Subscribe(context.Context) <-chan ledger.Attempt
	LedgerSince(n int64) []ledger.Attempt
}

// export appends the finished rows of a server to a file; "" means to none.
func export(srv source, name string) (*exporter, error) {
	e := &exporter{failed: make(chan error, 1), stop: func() {}, done: make(chan struct{}), rest: func() error { return nil }}
	if name == "" {
		close(e.done)
		return e, nil
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	rows := srv.Subscribe(ctx)
	enc := json.NewEncoder(file) // one write a row: a crash loses none that was finished
	last := int64(0)
	go func() {
		defer close(e.done)
		for a := range rows {
			if err := enc.Encode(a); err != nil {
				e.failed <- fmt.Errorf("ledger: %w", err)
				return
			}
			last = a.Seq
		}
	}()
	// Rows that finished while the server closed are not in the stream.
	e.rest = func() error {
		for _, a := range srv.LedgerSince(last) {
			if err := enc.Encode(a); err != nil {
				return fmt.Errorf("ledger: %w", err)
			}
		}
		return file.Close()
	}
	return e, nil
}

func (e *exporter) close() error {
	e.stop()
	<-e.done
	return e.rest()
}

func judgeCommand() *cobra.Command {
	var keys, rows, by string
	var asJSON bool
	var limit int
	c := &cobra.Command{
		Use:   "judge",
		Short: "Says of any application's mails: lost, doubled, unexpected, and who was told what",
		Long: `Compares a list of keys (or recipients), one a line, each of which should have
arrived once, with the ledger of a fake server (GET /ledger?format=jsonl, or
fake smtp --ledger). Exit codes: 0 pass, 1 fail, 3 nothing to judge.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			report, err := judgeFiles(keys, rows, judge.By(by))
			if errors.Is(err, judge.ErrNothing) {
				return Verdict{3, err.Error()}
			}
			if err != nil {
				return err
			}
			if err := printReport(c.OutOrStdout(), report, asJSON, limit); err != nil {
				return err
			}
			if !report.OK() {
				return Verdict{1, "judge: not every mail arrived exactly once"}
			}
			return nil
		},
	}
	c.Flags().StringVar(&keys, "keys", "", "file with one key or recipient a line")
	c.Flags().StringVar(&rows, "ledger", "", "ledger as JSON lines, - for standard input")
	c.Flags().StringVar(&by, "by", string(judge.Auto), "key, recipient or auto")
	c.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	c.Flags().IntVar(&limit, "limit", 20, "mails of a kind to tell, 0 for all")
	_ = c.MarkFlagRequired("keys")
	_ = c.MarkFlagRequired("ledger")
	return c
}

func judgeFiles(keysFile, ledgerFile string, by judge.By) (judge.Report, error) {
	switch by {
	case judge.Auto, judge.Key, judge.Recipient:
	default:
		return judge.Report{}, fmt.Errorf("--by %q: want key, recipient or auto", by)
	}
	f, err := os.Open(keysFile)
	if err != nil {
		return judge.Report{}, fmt.Errorf("keys: %w", err)
	}
	defer f.Close()
	keys, err := judge.ReadKeys(f)
	if err != nil {
		return judge.Report{}, err
	}
	in := os.Stdin
	if ledgerFile != "-" {
		if in, err = os.Open(ledgerFile); err != nil {
			return judge.Report{}, fmt.Errorf("ledger: %w", err)
		}
		defer in.Close()
	}
	rows, err := ledger.Decode(bufio.NewReader(in))
	if err != nil {
		return judge.Report{}, err
	}
	return judge.Judge(keys, rows, by)
}

func printReport(w io.Writer, r judge.Report, asJSON bool, limit int) error {
	if !asJSON {
		return r.Write(w, limit)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

func demoCommand() *cobra.Command {
	var opt demo.Options
	c := &cobra.Command{
		Use:   "demo",
		Short: "A naive and a careful sender before a server that loses 250s: 5 seconds, no infrastructure",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if f, ok := c.OutOrStdout().(*os.File); ok {
				opt.Live = term.IsTerminal(int(f.Fd()))
			}
			_, err := demo.Run(c.Context(), c.OutOrStdout(), opt)
			return err
		},
	}
	c.Flags().Uint64Var(&opt.Seed, "seed", 1, "seed of every draw")
	c.Flags().IntVar(&opt.Mails, "mails", 240, "bookings")
	return c
}
