package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

func checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check RUN",
		Short: "Judge a finished run again from its saved evidence",
		Long: `Reads the evidence in a run's folder, judges it anew, and writes the reports
again. It starts nothing and asks nothing of a running system.`,
		Example: "  mailproof check runs/latest",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			sum, err := scenarios.JudgeAgain(args[0])
			if err != nil {
				return err
			}
			if err := reports.Write(args[0], sum); err != nil {
				return err
			}
			closing(cmd.OutOrStdout(), args[0], sum)
			if sum.Verdict == verify.Pass || sum.Verdict == verify.SkippedRun {
				return nil
			}
			fmt.Fprintf(cmd.OutOrStdout(), "run it again: %s\n", sum.Command)
			return verdictError{sum.Verdict}
		},
	}
}
