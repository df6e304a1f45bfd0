package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"mailproof/system/notify/config"
	"mailproof/system/notify/offsets"
)

func offsetsCommand(out io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use: "offsets", Short: "Show where the bridge stands in Kafka, and move it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			g, err := group()
			if err != nil {
				return err
			}
			places, members, err := g.Show(cmd.Context())
			if err != nil {
				return err
			}
			return printPlaces(out, g, places, members)
		},
	}
	root.AddCommand(moveCommand(out))
	return root
}

func moveCommand(out io.Writer) *cobra.Command {
	var to offsets.Where
	since, execute := "", false
	cmd := &cobra.Command{
		Use: "move", Short: "Commit other offsets; every notifyd must be stopped. See docs/runbooks/kafka-offset-reset.md", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !execute {
				return errors.New("this makes events come again, or never: say --execute")
			}
			if since != "" {
				at, err := moment("since", since)
				if err != nil {
					return err
				}
				to.Since = *at
			}
			g, err := group()
			if err != nil {
				return err
			}
			places, err := g.Move(cmd.Context(), to)
			if err != nil {
				return err
			}
			return printPlaces(out, g, places, 0)
		},
	}
	cmd.Flags().BoolVar(&to.Earliest, "earliest", false, "to the oldest event that Kafka has")
	cmd.Flags().BoolVar(&to.Latest, "latest", false, "past the newest: what lies between is not read")
	cmd.Flags().StringVar(&since, "since", "", "to the first event written at this time or later, 2026-11-30T12:00:00Z")
	cmd.Flags().BoolVar(&execute, "execute", false, "do it")
	cmd.MarkFlagsMutuallyExclusive("earliest", "latest", "since")
	cmd.MarkFlagsOneRequired("earliest", "latest", "since")
	return cmd
}

func group() (offsets.Group, error) {
	cfg, err := config.Load()
	return offsets.Group{Brokers: cfg.KafkaBrokers, Group: cfg.KafkaGroup, Topic: cfg.KafkaTopic}, err
}

func printPlaces(out io.Writer, g offsets.Group, places []offsets.Place, members int) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "PARTITION\tOLDEST\tCOMMITTED\tEND\tLAG")
	var lag int64
	for _, p := range places {
		committed := fmt.Sprint(p.Committed)
		if p.Committed < 0 {
			committed = "never"
		}
		fmt.Fprintf(w, "%d\t%d\t%s\t%d\t%d\n", p.Partition, p.Start, committed, p.End, p.Lag)
		lag += p.Lag
	}
	fmt.Fprintf(w, "group %s of %s: %d members, %d events behind\n", g.Group, g.Topic, members, lag)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}
