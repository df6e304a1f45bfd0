package config

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/delivery"
	"mailproof/system/envconfig"
)

func good() map[string]string {
	return map[string]string{
		"NOTIFYD_DATABASE_URL":  "postgres://app:secret@db.example.test/mail?sslmode=disable",
		"NOTIFYD_AMQP_URLS":     "amqp://app:secret@a.example.test,amqp://app:secret@b.example.test",
		"NOTIFYD_KAFKA_BROKERS": "k.example.test:9092",
		"NOTIFYD_SMTP_ADDR":     "smtp.example.test:25",
	}
}

func with(kv ...string) map[string]string {
	m := good()
	for i := 0; i < len(kv); i += 2 {
		m[Prefix+kv[i]] = kv[i+1]
	}
	return m
}

func TestDefaultsAreTheSpecifiedFigures(t *testing.T) {
	t.Parallel()
	c, err := LoadFrom(good())
	require.NoError(t, err)
	require.Equal(t, []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute}, c.RetryDelays)
	require.Equal(t, 4, c.MaxAttempts)
	require.Equal(t, [4]int{8, 10, 2, 50}, [4]int{c.TicketConsumers, c.TicketPrefetch, c.MarketingConsumers, c.MarketingPrefetch})
	require.Equal(t, delivery.Resend, c.TicketPolicy)
	require.Equal(t, delivery.Hold, c.MarketingPolicy)
	require.Equal(t, 24*time.Hour, c.StaleAfter)
	require.Equal(t, 200, c.DeliveryLimit)
	require.Len(t, c.AMQPURLs, 2)
}

// Unless said otherwise marketing has 32 mails at work, however many consumers
// they are shared among.
func TestMarketingMailsAtWork(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ consumers, prefetch, parallel, want string }{
		{"2", "50", "0", "16"},
		{"1", "50", "0", "32"},
		{"8", "10", "0", "4"},
		{"64", "10", "0", "1"},
		{"0", "50", "0", "32"},
		{"2", "1", "0", "1"},
		{"2", "50", "16", "16"},
		{"2", "10", "16", "10"},
	} {
		got, err := LoadFrom(with("MARKETING_CONSUMERS", c.consumers, "MARKETING_PREFETCH", c.prefetch, "MARKETING_PARALLEL", c.parallel))
		require.NoError(t, err)
		require.Equal(t, c.want, strconv.Itoa(got.MarketingParallel), "%+v", c)
	}
}

func TestEveryProblemIsNamedAtOnce(t *testing.T) {
	t.Parallel()
	_, err := LoadFrom(map[string]string{"NOTIFYD_LEASE": "soon", "NOTIFYD_TICKET_CONSUMERS": "many"})
	require.Error(t, err)
	for _, name := range []string{"DATABASE_URL", "AMQP_URLS", "KAFKA_BROKERS", "SMTP_ADDR", "LEASE", "TICKET_CONSUMERS"} {
		require.ErrorContains(t, err, Prefix+name+":")
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		vars map[string]string
		want string
	}{
		"a send outlives its lease (TRAP-1-3)":            {with("SEND_DEADLINE", "40s"), "NOTIFYD_LEASE: is 45s, must be above"},
		"stale bound beyond the dedupe rows (TRAP-2-4)":   {with("RETENTION", "24h"), "NOTIFYD_STALE_AFTER: is 24h0m0s, must be below"},
		"marketing mails at work below none":              {with("MARKETING_PARALLEL", "-1"), "NOTIFYD_MARKETING_PARALLEL"},
		"a rate that is no number":                        {with("MARKETING_RATE", "NaN"), "NOTIFYD_MARKETING_RATE: is NaN"},
		"a sweeper's rate that is no number":              {with("SWEEPER_RATE", "NaN"), "NOTIFYD_SWEEPER_RATE: is NaN"},
		"tokens too rare for what is fetched ahead":       {with("MARKETING_RATE", "0.05"), "NOTIFYD_MARKETING_RATE: is 0.05 a second: NOTIFYD_MARKETING_CONSUMERS × NOTIFYD_MARKETING_PREFETCH = 100 deliveries"},
		"no database connection for marketing":            {with("MARKETING_POOL", "0"), "NOTIFYD_MARKETING_POOL"},
		"unsubscribing in the clear (RFC 8058)":           {with("UNSUBSCRIBE_URL", "http://example.test/out"), "NOTIFYD_UNSUBSCRIBE_URL"},
		"unknown policy":                                  {with("TICKET_POLICY", "hope"), "NOTIFYD_TICKET_POLICY"},
		"delays that fall":                                {with("RETRY_DELAYS", "1m,10s"), "NOTIFYD_RETRY_DELAYS: delay 10s is shorter"},
		"a delay the broker cannot keep":                  {with("RETRY_DELAYS", "10us"), "not a whole number of milliseconds"},
		"sweeper neither on nor off":                      {with("SWEEPER", "maybe"), "NOTIFYD_SWEEPER"},
		"another protocol":                                {with("AMQP_URLS", "http://a"), "NOTIFYD_AMQP_URLS"},
		"instance that cannot stand in an EHLO":           {with("INSTANCE", "a b"), "NOTIFYD_INSTANCE"},
		"user without password":                           {with("SMTP_USER", "u"), "NOTIFYD_SMTP_PASSWORD"},
		"no attempt at all":                               {with("MAX_ATTEMPTS", "-1"), "NOTIFYD_MAX_ATTEMPTS"},
		"a sender that is no address":                     {with("MAIL_FROM", "nobody"), "NOTIFYD_MAIL_FROM"},
		"ticket lane without consumers":                   {with("TICKET_CONSUMERS", "0"), "NOTIFYD_TICKET_CONSUMERS"},
		"zero deadline":                                   {with("SEND_DEADLINE", "0s"), "NOTIFYD_SEND_DEADLINE"},
		"scenario timing with a margin that does not fit": {with("SEND_DEADLINE", "2s", "LEASE", "4s", "LEASE_MARGIN", "2s"), "NOTIFYD_LEASE"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := LoadFrom(c.vars)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestSecretsAreMasked(t *testing.T) {
	t.Parallel()
	c, err := LoadFrom(with("SMTP_USER", "u", "SMTP_PASSWORD", "secret"))
	require.NoError(t, err)
	var out strings.Builder
	require.NoError(t, Describe(&out, c))
	text := out.String()
	require.NotContains(t, text, "secret")
	require.Contains(t, text, "postgres://app:***@db.example.test/mail?***")
	require.Contains(t, text, "amqp://app:***@a.example.test,amqp://app:***@b.example.test")
	require.Contains(t, text, "10s,1m,5m")
}

func TestEveryVariableIsExplained(t *testing.T) {
	t.Parallel()
	for _, v := range envconfig.Vars(Prefix, Config{}) {
		require.NotEmpty(t, v.Doc, v.Name)
	}
}

func TestTransport(t *testing.T) {
	t.Parallel()
	base := map[string]string{
		"NOTIFYD_DATABASE_URL": "postgres://db/x", "NOTIFYD_AMQP_URLS": "amqp://q", "NOTIFYD_KAFKA_BROKERS": "k:9092",
	}
	load := func(more ...string) error {
		vars := map[string]string{}
		for k, v := range base {
			vars[k] = v
		}
		for i := 0; i < len(more); i += 2 {
			vars[Prefix+more[i]] = more[i+1]
		}
		_, err := LoadFrom(vars)
		return err
	}
	require.ErrorContains(t, load(), "NOTIFYD_SMTP_ADDR: must be set")
	require.ErrorContains(t, load(), "notifyd config", "it says where to read on")
	require.NoError(t, load("SMTP_ADDR", "m:25"))
	require.ErrorContains(t, load("TRANSPORT", "pigeon"), "NOTIFYD_TRANSPORT")
	require.ErrorContains(t, load("TRANSPORT", "resend"), "NOTIFYD_RESEND_API_KEY: must be set")
	require.NoError(t, load("TRANSPORT", "resend", "RESEND_API_KEY", "re_1"))
	require.ErrorContains(t, load("TRANSPORT", "resend", "RESEND_API_KEY", "re_1", "RESEND_URL", "http://api.resend.com"), "NOTIFYD_RESEND_URL")
	require.ErrorContains(t, load("TRANSPORT", "resend", "RESEND_API_KEY", "re_1", "KEY_LIFETIME", "24h"), "NOTIFYD_KEY_LIFETIME")
	require.ErrorContains(t, load("SMTP_ADDR", "m:25", "PROVIDER_LOG_URL", "localhost"), "NOTIFYD_PROVIDER_LOG_URL")
	require.ErrorContains(t, load("SMTP_ADDR", "m:25", "RECONCILER", "maybe"), "NOTIFYD_RECONCILER")
}
