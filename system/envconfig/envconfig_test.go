package envconfig

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type sample struct {
	URL      string          `env:"URL,required,notEmpty" secret:"url" doc:"a database"`
	Nodes    []string        `env:"NODES" secret:"url" doc:"nodes"`
	Password string          `env:"PASSWORD" secret:"all" doc:"a password"`
	Delays   []time.Duration `env:"DELAYS" envDefault:"10s,1m" doc:"delays"`
	Pool     int             `env:"POOL" envDefault:"4" doc:"connections"`
}

func TestEachProblemNamesItsVariable(t *testing.T) {
	t.Parallel()
	c, problems := Read[sample]("X_", map[string]string{"X_POOL": "many", "X_DELAYS": "5s", "POOL": "7"})
	err := errors.Join(problems...)
	require.ErrorContains(t, err, "X_URL: must be set")
	require.ErrorContains(t, err, "X_POOL: ")
	require.NotContains(t, err.Error(), "Pool", "the field")
	require.Len(t, problems, 2)
	require.Equal(t, []time.Duration{5 * time.Second}, c.Delays, "the others are read")

	_, problems = Read[sample]("X_", map[string]string{"X_URL": ""})
	require.ErrorContains(t, errors.Join(problems...), "X_URL: must not be empty")
}

func TestTheProcessIsReadWithoutVariables(t *testing.T) {
	t.Setenv("X_URL", "postgres://db/x")
	t.Setenv("X_POOLS", "5")
	c, problems := Read[sample]("X_", nil)
	require.Empty(t, problems)
	require.Equal(t, "postgres://db/x", c.URL)
	require.Equal(t, []string{"X_POOLS"}, Unknown[sample]("X_", nil))
	require.Empty(t, Unknown[sample]("X_", map[string]string{"X_POOL": "1", "Y_POOLS": "1"}))
}

func TestDescribeMasksSecrets(t *testing.T) {
	t.Parallel()
	c, problems := Read[sample]("X_", map[string]string{
		"X_URL": "postgres://app:secret@db/x?sslkey=secret", "X_NODES": "amqp://u:secret@a,amqp://b,secret", "X_PASSWORD": "secret",
	})
	require.Empty(t, problems)
	var out bytes.Buffer
	require.NoError(t, Describe(&out, "X_", c))
	require.Equal(t, `VARIABLE    VALUE                        DEFAULT  MEANING
X_URL       postgres://app:***@db/x?***  -        a database
X_NODES     amqp://u:***@a,amqp://b,***  -        nodes
X_PASSWORD  ***                          -        a password
X_DELAYS    10s,1m                       10s,1m   delays
X_POOL      4                            4        connections
`, out.String())
}
