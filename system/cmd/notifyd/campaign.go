package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"mailproof/system/failpoint"
	"mailproof/system/notify"
	"mailproof/system/notify/campaign"
	"mailproof/system/notify/config"
	"mailproof/system/notify/logging"
)

func campaignCommand(out io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "campaign",
		Short: "Send marketing mails, count them, or stop them",
		Long: "A campaign is any number of marketing mails under one id; each address gets one mail per campaign, however often\n" +
			"it is listed and however often the command is repeated. The environment is that of the service, which sends\n" +
			"the mails; its log goes to stderr. The same is served over HTTP: POST /campaigns/ID/mails, GET and DELETE /campaigns/ID.",
		Example: `  notifyd campaign send spring-26 --template offer --file recipients.ndjson
  notifyd campaign show spring-26
  notifyd campaign stop spring-26`,
		Args: cobra.NoArgs, RunE: helpOnly,
	}
	root.AddCommand(campaignSendCommand(out), campaignShowCommand(out), campaignStopCommand(out))
	return root
}

func campaignSendCommand(out io.Writer) *cobra.Command {
	var req campaign.Request
	var file, sendAfter, expiresAt string
	cmd := &cobra.Command{
		Use: "send ID", Short: "Take mails in, from a file or from stdin; safe to repeat", Args: cobra.ExactArgs(1),
		Long: "Each line is one mail: {\"to\":\"anna@example.test\",\"data\":{\"headline\":\"…\",\"text\":\"…\"}}; data may also have name,\n" +
			"locale and link. A line that cannot be sent ends the command with its number; the lines before it are taken in,\n" +
			"and so they are once more when the command is repeated with the line mended: who has a mail of this campaign gets\n" +
			"no second one, for as long as its row is kept (NOTIFYD_RETENTION).",
		Example: `  notifyd campaign send spring-26 --template offer --file recipients.ndjson
  notifyd campaign send spring-26 --template offer --expires-at 2026-12-24T18:00:00Z < recipients.ndjson`,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.ID = args[0]
			if req.SendAfter, err = moment("send-after", sendAfter); err != nil {
				return err
			}
			if req.ExpiresAt, err = moment("expires-at", expiresAt); err != nil {
				return err
			}
			in := cmd.InOrStdin()
			if file != "-" {
				f, err := os.Open(file)
				if err != nil {
					return fmt.Errorf("recipients: %w", err)
				}
				defer func() { _ = f.Close() }() // only read
				in = f
			}
			req.Lines = in
			return withCampaigns(cmd, func(ctx context.Context, s *campaign.Service) error {
				receipt, err := s.Send(ctx, req)
				if errors.Is(err, campaign.ErrInvalid) {
					return err
				}
				if printErr := printJSON(out, receipt); err == nil {
					return printErr
				}
				return err
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&req.Template, "template", "", "template of the mails: offer")
	f.StringVar(&file, "file", "-", "file of JSON lines; - reads stdin")
	f.StringVar(&sendAfter, "send-after", "", "not to be sent before, such as 2026-12-24T08:00:00Z (RFC 3339)")
	f.StringVar(&expiresAt, "expires-at", "", "not to be sent from then on; what waits then becomes EXPIRED")
	if err := cmd.MarkFlagRequired("template"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

func campaignShowCommand(out io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Count a campaign's mails by status", Args: cobra.ExactArgs(1),
		Example: "  notifyd campaign show spring-26",
		RunE: func(cmd *cobra.Command, args []string) error {
			return withCampaigns(cmd, func(ctx context.Context, s *campaign.Service) error { return printState(ctx, out, s, args[0]) })
		},
	}
}

func campaignStopCommand(out io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "stop ID", Short: "Send no further mail of a campaign; there is no way back", Args: cobra.ExactArgs(1),
		Long: "A flag is set that each claim reads: mails at work go out, every other one becomes CANCELLED when its turn\n" +
			"comes, and no mail is taken in any more.",
		Example: "  notifyd campaign stop spring-26",
		RunE: func(cmd *cobra.Command, args []string) error {
			return withCampaigns(cmd, func(ctx context.Context, s *campaign.Service) error {
				if err := s.Stop(ctx, args[0]); err != nil {
					return err
				}
				return printState(ctx, out, s, args[0])
			})
		},
	}
}

func printState(ctx context.Context, out io.Writer, s *campaign.Service, id string) error {
	state, err := s.Show(ctx, id)
	if err != nil {
		return err
	}
	return printJSON(out, state)
}

// moment reads a flag that may be missing.
func moment(flag, text string) (*time.Time, error) {
	if text == "" {
		return nil, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return nil, fmt.Errorf("--%s: %q is no time such as 2026-12-24T18:00:00Z (RFC 3339)", flag, text)
	}
	return &at, nil
}

// withCampaigns is operate for campaigns.
func withCampaigns(cmd *cobra.Command, do func(context.Context, *campaign.Service) error) error {
	if err := failpoint.Check(); err != nil {
		return err
	}
	cfg, err := config.Load()
	if err != nil {
		return err
	}
	log := logging.New(cmd.ErrOrStderr(), max(cfg.LogLevel, slog.LevelWarn)).With("instance", cfg.Instance)
	return notify.Campaigns(cmd.Context(), cfg, log, do)
}
