package main

import (
	"errors"

	"github.com/spf13/cobra"

	"mailproof/internal/stand"
)

func upCommand() *cobra.Command {
	cfg := stand.Config{Dir: "runs/up", Policy: "resend"}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the whole system on real parts and let it stand, to try things by hand",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Out = cmd.OutOrStdout()
			if err := cfg.Check(); err != nil {
				return usage(err)
			}
			err := stand.Run(cmd.Context(), cfg)
			if errors.Is(err, errInterrupted) {
				return nil // that is how it ends
			}
			return err
		},
	}
	cmd.Flags().StringVar(&cfg.Dir, "out", cfg.Dir, "folder for logs and the environment file")
	cmd.Flags().StringVar(&cfg.Policy, "policy", cfg.Policy, "of ticket mails whose outcome is not known: resend, hold, same-key")
	return cmd
}
