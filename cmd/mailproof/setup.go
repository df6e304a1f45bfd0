package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"mailproof/internal/setup"
	"mailproof/verify"
)

func setupCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Look for Postgres, RabbitMQ, Java and Kafka's jars; install what is missing after asking",
		Long: `Says what it would install, how large it is and what it will not touch, then
asks. YES=1, CI=true or --yes answer yes. Nothing is installed when nothing is
missing.`,
		Example: "  mailproof setup\n  YES=1 mailproof setup",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return setup.Ensure(cmd.Context(), setup.Options{Yes: yes, Out: cmd.OutOrStdout()})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "agree to everything")
	return cmd
}

func doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "List what a run needs, what is there and what is missing",
		Long: `Lists the parts that a run uses. It changes nothing. The exit code is 3 when a
part is missing that nothing can stand in for.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return doctor(cmd.Context(), cmd.OutOrStdout(), os.Args[0])
		},
	}
}

func doctor(ctx context.Context, out io.Writer, binary string) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	missing := 0
	for _, i := range setup.Check(ctx) {
		switch {
		case i.Found:
			fmt.Fprintf(t, "ok\t%s\t%s\t%s\n", i.Name, i.Version, i.Path)
			continue
		case i.Optional:
			fmt.Fprintf(t, "optional\t%s\t%s\t\n", i.Name, i.Why)
		default:
			missing++
			fmt.Fprintf(t, "missing\t%s\t%s\t\n", i.Name, i.Why)
		}
		for _, line := range i.Fix {
			fmt.Fprintf(t, "\t\t%s\t\n", line)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if missing > 0 {
		fmt.Fprintf(out, "\n%s setup installs what is missing, after asking\n", binary)
		return verdictError{verify.Invalid}
	}
	return nil
}
