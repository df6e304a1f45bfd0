package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"

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
again, where it may; those of a gate too, when the run was one. It starts nothing and
asks nothing of a running system.`,
		Example: "  mailproof check runs/latest",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("check: name one folder of a run, such as runs/latest")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			sum, err := scenarios.JudgeAgain(args[0])
			if err != nil {
				return err
			}
			if err := unlessReadOnly(cmd.OutOrStdout(), reports.Write(args[0], sum)); err != nil {
				return err
			}
			if g, ok, err := scenarios.JudgeGateAgain(args[0], sum); ok || err != nil {
				return errors.Join(err, recheckGate(cmd.OutOrStdout(), args[0], g, ok))
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

// recheckGate writes a gate's reports again and says what was decided.
func recheckGate(out io.Writer, dir string, g reports.Gate, ok bool) error {
	if !ok {
		return nil
	}
	if err := unlessReadOnly(out, reports.WriteGate(dir, g)); err != nil {
		return err
	}
	return decision(out, dir, g)
}

// unlessReadOnly lets evidence be judged where it lies, another's folder or a
// CI's archive: that it may not be written to is said, and hides no verdict.
func unlessReadOnly(out io.Writer, err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		fmt.Fprintf(out, "the files in the folder stay as they were: %v\n", err)
		return nil
	}
	return err
}
