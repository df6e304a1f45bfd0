package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"mailproof/fakes/resendapi"
)

type resendFlags struct {
	opt    resendapi.Options
	rules  string
	ledger string
	keys   []string
}

func resendCommand() *cobra.Command {
	var f resendFlags
	c := &cobra.Command{
		Use:   "resend",
		Short: "Resend's HTTP API with its idempotency, scripted faults, a ledger and a page",
		Long: `Runs until it is interrupted. Point an SDK at it: RESEND_BASE_URL, or its base
URL option. Faults come from a rules file, from the control API
(POST /_control/rules), from the page, or from the recipient's address:
ann+fault-stored-drop-x1@shop.test, ann+fault-request-503@shop.test.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c.Context(), c.OutOrStdout()) },
	}
	fl, opt := c.Flags(), &f.opt
	fl.StringVar(&opt.Addr, "listen", "127.0.0.1:8026", "address of the API; the page and the control API are below /_control/")
	fl.StringVar(&opt.ControlAddr, "control", "", "a second address for the page and the control API, which connection faults do not reach")
	fl.Uint64Var(&opt.Seed, "seed", 1, "seed of every draw and of the ids")
	fl.StringVar(&f.rules, "rules", "", "file with rules as JSON")
	fl.StringVar(&f.ledger, "ledger", "", "file to which each finished row is appended as a JSON line")
	fl.StringArrayVar(&f.keys, "api-key", nil, "API key that is known, or key:access with full, sending, inactive, suspended or no-scopes; may be repeated; none accepts any")
	fl.StringArrayVar(&opt.Domains, "domain", nil, "verified domain of senders, may be repeated; none accepts any")
	fl.StringVar(&opt.TestingAddress, "testing-address", "", "the only recipient of mails from resend.dev")
	fl.IntVar(&opt.RateLimit, "rate-limit", 0, "requests per second and API key, 0 for none")
	fl.IntVar(&opt.DailyQuota, "daily-quota", 0, "mails a day, 0 for any")
	fl.IntVar(&opt.MonthlyQuota, "monthly-quota", 0, "mails a month, 0 for any")
	fl.StringVar((*string)(&opt.Idempotency.Compare), "payload-compare", string(resendapi.CompareBytes), "what makes two payloads of one key the same: bytes or canonical")
	fl.StringVar((*string)(&opt.Idempotency.Scope), "key-scope", string(resendapi.ScopeEndpoint), "what a key is unique within: endpoint or credential")
	fl.DurationVar(&opt.Idempotency.Lifetime, "key-lifetime", 0, "how long a key lives (default 24h)")
	fl.BoolVar(&opt.Idempotency.ValidationReservesKey, "validation-reserves-key", false, "a refused request keeps its key")
	fl.BoolVar(&opt.Idempotency.CompareFirst, "compare-first", false, "another payload is a mismatch even while the first request runs")
	fl.BoolVar(&opt.AllowNoUserAgent, "allow-no-user-agent", false, "let requests without a User-Agent in")
	fl.BoolVar(&opt.AllowExampleDomains, "allow-example-domains", false, "let mails to example.com and test.com in")
	fl.BoolVar(&opt.RemoteWebhooks, "remote-webhooks", false, "let webhooks leave this machine")
	fl.DurationVar(&opt.DeliverAfter, "deliver-after", 0, "how long after it was sent a mail counts as delivered")
	return c
}

func (f *resendFlags) options() (resendapi.Options, error) {
	opt := f.opt
	var err error
	if opt.Rules, err = readRules(f.rules); err != nil {
		return opt, err
	}
	for _, k := range f.keys {
		key, access, ok := strings.Cut(k, ":")
		if !ok {
			access = string(resendapi.FullAccess)
		}
		if key == "" {
			return opt, errors.New("--api-key: want a key, or key:access")
		}
		if opt.APIKeys == nil {
			opt.APIKeys = map[string]resendapi.Access{}
		}
		opt.APIKeys[key] = resendapi.Access(access)
	}
	return opt, nil
}

func (f *resendFlags) run(ctx context.Context, out io.Writer) error {
	opt, err := f.options()
	if err != nil {
		return err
	}
	srv, err := resendapi.Start(opt)
	if err != nil {
		return taken(err, "--listen and --control choose other addresses")
	}
	export, err := export(srv, f.ledger)
	if err != nil {
		return errors.Join(err, srv.Close())
	}
	fmt.Fprintf(out, "resend  %s\n", srv.URL)
	fmt.Fprintf(out, "page    %s/\n", srv.ControlURL())
	fmt.Fprintf(out, "seed    %d, %d rules\n", opt.Seed, len(opt.Rules))
	select {
	case <-ctx.Done():
	case err = <-export.failed:
	}
	closed := srv.Close()
	return errors.Join(err, closed, export.close())
}
