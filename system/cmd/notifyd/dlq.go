package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"mailproof/system/delivery"
	"mailproof/system/notify"
	"mailproof/system/notify/admin"
	"mailproof/system/notify/dlq"
)

// choice is the flags that choose dead mails.
type choice struct {
	mailType, reason, olderThan, key, booking string
	all                                       bool
}

func (c *choice) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.mailType, "type", "", "ticket or marketing")
	f.StringVar(&c.reason, "reason", "", "part of the last error, such as 451 or a host name")
	f.StringVar(&c.olderThan, "older-than", "", "dead for at least so long: 90s, 10m, 24h")
	f.StringVar(&c.key, "key", "", "one dedupe key")
	f.StringVar(&c.booking, "booking", "", "one booking")
}

func (c *choice) filter() (delivery.DeadFilter, error) {
	return admin.Filter(c.mailType, c.reason, c.olderThan, c.key, c.booking)
}

// change is the filter of a command that changes something.
func (c *choice) change() (delivery.DeadFilter, error) {
	f, err := c.filter()
	if err != nil {
		return f, err
	}
	return f, admin.Chooses(f, c.all)
}

// who is the flags that go into the audit.
type who struct{ actor, why string }

func (w *who) flags(cmd *cobra.Command, why string) {
	cmd.Flags().StringVar(&w.actor, "actor", os.Getenv("USER"), "who decides this, for the audit")
	cmd.Flags().StringVar(&w.why, "why", "", why)
}

func dlqCommand(out io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "dlq",
		Short: "Look at dead mails, send them again, or give them up",
		Long: "The table of notifications is read, never the dead-letter queue. A mail that was sent, or cancelled, is never\n" +
			"sent again by a replay. The environment is that of the service; its log goes to stderr.",
		Args: cobra.NoArgs, RunE: helpOnly,
	}
	root.AddCommand(listCommand(out), inspectCommand(out), replayCommand(out), discardCommand(out), tidyCommand(out))
	return root
}

func listCommand(out io.Writer) *cobra.Command {
	var c choice
	limit, asJSON := 100, false
	cmd := &cobra.Command{
		Use: "list", Short: "List dead mails, the oldest death first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := c.filter()
			if err != nil {
				return err
			}
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				rows, err := o.List(ctx, f, limit)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(out, dlq.Views(rows))
				}
				return printMails(out, dlq.Views(rows))
			})
		},
	}
	c.flags(cmd)
	cmd.Flags().IntVar(&limit, "limit", limit, "mails at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func inspectCommand(out io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "inspect KEY", Short: "Show one mail and what was decided about it, dead or not", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				d, err := o.Inspect(ctx, args[0])
				if err != nil {
					return err
				}
				return printJSON(out, d.View())
			})
		},
	}
}

func replayCommand(out io.Writer) *cobra.Command {
	var c choice
	var w who
	var req dlq.ReplayRequest
	cmd := &cobra.Command{
		Use: "replay", Short: "Give dead mails more tries; safe to repeat", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if req.Filter, err = c.change(); err != nil {
				return err
			}
			req.Actor, req.Reason = w.actor, w.why
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				report, err := o.Replay(ctx, req)
				return printReport(out, report, err)
			})
		},
	}
	c.flags(cmd)
	w.flags(cmd, "why, for the audit")
	cmd.Flags().BoolVar(&c.all, "all", false, "needed where no filter is given")
	cmd.Flags().Float64Var(&req.Rate, "rate", 0, "mails per second; 0 means as fast as it goes")
	cmd.Flags().IntVar(&req.Attempts, "attempts", 4, "how many more tries each mail gets")
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "say what would be replayed, and change nothing")
	cmd.Flags().BoolVar(&req.RenderAnew, "render-anew", false, "forget the bytes that were refused: for mails that a bad deploy rendered")
	return cmd
}

func discardCommand(out io.Writer) *cobra.Command {
	var c choice
	var w who
	var req dlq.DiscardRequest
	cmd := &cobra.Command{
		Use: "discard", Short: "Give dead mails up: they stay in the table and are listed no more", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if req.Filter, err = c.change(); err != nil {
				return err
			}
			req.Actor, req.Reason = w.actor, w.why
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				report, err := o.Discard(ctx, req)
				return printReport(out, report, err)
			})
		},
	}
	c.flags(cmd)
	w.flags(cmd, "why; needed")
	cmd.Flags().BoolVar(&c.all, "all", false, "needed where no filter is given")
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "say what would be given up, and change nothing")
	return cmd
}

func tidyCommand(out io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "tidy", Short: "Bring the dead-letter queue in line with the table, as notifyd does by itself", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				tally, err := o.Cleaner.Tidy(ctx, nil)
				if err != nil {
					return err
				}
				return printJSON(out, tally)
			})
		},
	}
}

func sendAgainCommand(out io.Writer) *cobra.Command {
	var w who
	cmd := &cobra.Command{
		Use: "send-again KEY", Short: "Send a mail a second time under a new key, for a customer who asks", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return operate(cmd, func(ctx context.Context, o dlq.Operator) error {
				row, err := o.SendAgain(ctx, args[0], w.actor, w.why)
				if err != nil {
					return err
				}
				return printJSON(out, dlq.View(row))
			})
		},
	}
	w.flags(cmd, "why; needed")
	return cmd
}

// operate reads the environment and runs do; what it says is on stdout alone,
// the log on stderr.
func operate(cmd *cobra.Command, do func(context.Context, dlq.Operator) error) error {
	cfg, log, err := quietConfig(cmd)
	if err != nil {
		return err
	}
	return notify.Operate(cmd.Context(), cfg, log, do)
}

// printReport also tells what was done before a failure.
func printReport(out io.Writer, r dlq.Report, err error) error {
	if errors.Is(err, dlq.ErrInvalid) {
		return err
	}
	if printErr := printJSON(out, r); err == nil {
		return printErr
	}
	return err
}

func printJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

func printMails(out io.Writer, mails []dlq.Mail) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tRECIPIENT\tTRIES\tDEAD SINCE\tERROR")
	for _, m := range mails {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", m.DedupeKey, m.Recipient, m.Attempts, m.Changed.UTC().Format(time.RFC3339), short(m.Error))
	}
	fmt.Fprintf(w, "%d dead mails\n", len(mails))
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// short keeps a line a line; inspect shows the whole.
func short(s string) string {
	const most = 80
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "…"
	}
	return s
}
