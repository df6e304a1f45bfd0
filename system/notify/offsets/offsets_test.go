package offsets

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The group is shown and moved to either end and to a time, but not while it has
// a member.
func TestMove(t *testing.T) {
	t.Parallel()
	broker, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "events"))
	require.NoError(t, err)
	defer broker.Close()
	g := Group{Brokers: broker.ListenAddrs(), Group: "notify", Topic: "events"}
	client, err := kgo.NewClient(kgo.SeedBrokers(g.Brokers...))
	require.NoError(t, err)
	defer client.Close()
	begin := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	for i := range 10 {
		r := &kgo.Record{Topic: g.Topic, Value: []byte(fmt.Sprint(i)), Timestamp: begin.Add(time.Duration(i) * time.Minute)}
		require.NoError(t, client.ProduceSync(t.Context(), r).FirstErr())
	}
	show := func() Place {
		t.Helper()
		places, _, err := g.Show(t.Context())
		require.NoError(t, err)
		require.Len(t, places, 1)
		return places[0]
	}
	require.Equal(t, Place{Committed: -1, End: 10, Lag: 10}, show())

	member, err := kgo.NewClient(kgo.SeedBrokers(g.Brokers...), kgo.ConsumerGroup(g.Group), kgo.ConsumeTopics(g.Topic))
	require.NoError(t, err)
	member.PollFetches(t.Context())
	_, members, err := g.Show(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, members)
	_, err = g.Move(t.Context(), Where{Earliest: true})
	require.ErrorIs(t, err, ErrMembers)
	require.NoError(t, member.LeaveGroupContext(t.Context()))
	member.Close()

	for _, c := range []struct {
		to   Where
		want int64
	}{{Where{Latest: true}, 10}, {Where{Earliest: true}, 0}, {Where{Since: begin.Add(4 * time.Minute)}, 4}, {Where{Since: time.Now()}, 10}} {
		places, err := g.Move(t.Context(), c.to)
		require.NoError(t, err)
		require.Equal(t, []Place{{Committed: c.want, End: 10, Lag: 10 - c.want}}, places)
		require.Equal(t, places[0], show())
	}
	_, err = g.Move(t.Context(), Where{})
	require.ErrorContains(t, err, "where")
}
