package rabbitmq

import (
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/infra"
)

func TestParseQueues(t *testing.T) {
	t.Parallel()
	got, err := parseQueues([]byte(`[
		{"name":"q","type":"quorum","leader":"r1@localhost","members":["r1@localhost","r2@localhost"],"online":["r1@localhost"],"messages":3,"messages_ready":2,"messages_unacknowledged":1},
		{"name":"c","type":"classic","leader":"","members":"","online":"","messages":0,"messages_ready":0,"messages_unacknowledged":0}]`))
	require.NoError(t, err)
	require.Equal(t, []infra.Queue{
		{Name: "q", Type: "quorum", Leader: "r1@localhost", Members: []string{"r1@localhost", "r2@localhost"}, Online: []string{"r1@localhost"}, Messages: 3, Ready: 2, Unacked: 1},
		{Name: "c", Type: "classic"},
	}, got)
	_, err = parseQueues([]byte("Error: timeout"))
	require.ErrorContains(t, err, "list_queues")
}
