package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/system/envconfig"
	"mailproof/system/notify/config"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := command(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestConfigCommandPrintsEveryVariable(t *testing.T) {
	t.Setenv("NOTIFYD_DATABASE_URL", "postgres://app:secret@db.example.test/mail")
	t.Setenv("NOTIFYD_AMQP_URLS", "amqp://app:secret@q.example.test")
	t.Setenv("NOTIFYD_KAFKA_BROKERS", "k.example.test:9092")
	t.Setenv("NOTIFYD_SMTP_ADDR", "smtp.example.test:25")
	out, err := run(t, "config")
	require.NoError(t, err)
	for _, v := range envconfig.Vars(config.Prefix, config.Config{}) {
		require.Contains(t, out, v.Name)
		require.Contains(t, out, v.Doc)
	}
	require.NotContains(t, out, "secret")
}

// It prints them also when the environment is wrong: that is when they are
// looked for.
func TestConfigCommandWithoutAnEnvironment(t *testing.T) {
	out, err := run(t, "config")
	require.ErrorContains(t, err, "NOTIFYD_DATABASE_URL: must be set")
	require.Contains(t, out, "NOTIFYD_RETRY_DELAYS")
}

func TestFailpointsNeedTheirBuild(t *testing.T) {
	t.Setenv("FAILPOINTS", "worker.after-claim=kill")
	_, err := run(t)
	require.ErrorContains(t, err, "without the tag failpoint")
}

func TestUnknownCommand(t *testing.T) {
	for _, args := range [][]string{{"ruin"}, {"dlq", "lsit"}, {"unknown", "recncile"}, {"campaign", "sent"}, {"outbox", "deaad"}, {"offsets", "mvoe"}} {
		_, err := run(t, args...)
		require.ErrorContains(t, err, `unknown command "`+args[len(args)-1]+`"`, "a script must not take the help for success")
	}
}
