package faults

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/history"
)

const topic = "booking.events"

func kafka(t *testing.T) (brokers []string, client *kgo.Client) {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	client, err = kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return cluster.ListenAddrs(), client
}

func produce(t *testing.T, client *kgo.Client, n, from int) {
	t.Helper()
	for i := range n {
		r := &kgo.Record{Topic: topic, Key: fmt.Appendf(nil, "b%d", from+i), Value: fmt.Appendf(nil, `{"event_id":"e%d","dedupe_key":"ticket:b%d","amount":12345678901234567890}`, from+i, from+i)}
		require.NoError(t, client.ProduceSync(t.Context(), r).FirstErr())
	}
}

// readAll makes a consumer group commit the end of the topic.
func readAll(t *testing.T, client *kgo.Client) {
	t.Helper()
	admin := kadm.NewClient(client)
	ends, err := admin.ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	var offsets kadm.Offsets
	ends.Each(func(o kadm.ListedOffset) {
		offsets.Add(kadm.Offset{Topic: o.Topic, Partition: o.Partition, At: o.Offset, LeaderEpoch: -1})
	})
	require.NoError(t, admin.CommitAllOffsets(t.Context(), "bridge", offsets))
}

func TestDuplicatesAndStrangersArriveAsOftenAsSaid(t *testing.T) {
	brokers, client := kafka(t)
	produce(t, client, 5, 0) // before the faults: not struck
	dup := &DuplicateRecords{Brokers: brokers, Topic: topic, Copies: 4}
	foreign := &ForeignDuplicate{Brokers: brokers, Topic: topic, Member: "event_id"}
	runs := []*Run{NewRun(dup, clock), NewRun(foreign, clock)}
	for _, r := range runs {
		require.NoError(t, r.Inject(t.Context()))
	}
	produce(t, client, 20, 5)
	for i := len(runs) - 1; i >= 0; i-- {
		require.NoError(t, runs[i].Heal(t.Context()))
	}
	readAll(t, client)
	for _, r := range runs {
		require.NoError(t, r.Witness(t.Context()))
		require.Equal(t, history.Installed, r.Record().Outcome, r.Record().Reason)
		require.Equal(t, 20, r.Record().Count, r.Record().Reason)
	}

	records, err := readTopic(t.Context(), brokers, topic)
	require.NoError(t, err)
	require.Len(t, records, 5+20*5+20)
	ids := map[string]map[string]int{} // dedupe key → event id → times
	for _, r := range records {
		var e struct {
			ID     string          `json:"event_id"`
			Key    string          `json:"dedupe_key"`
			Amount json.RawMessage `json:"amount"`
		}
		require.NoError(t, json.Unmarshal(r.Value, &e))
		require.Equal(t, "12345678901234567890", string(e.Amount), "a stranger's record is changed in nothing else")
		if ids[e.Key] == nil {
			ids[e.Key] = map[string]int{}
		}
		ids[e.Key][e.ID]++
	}
	for i := range 25 {
		got := ids[fmt.Sprintf("ticket:b%d", i)]
		own := got[fmt.Sprintf("e%d", i)]
		if i < 5 {
			require.Equal(t, map[string]int{fmt.Sprintf("e%d", i): 1}, got)
			continue
		}
		require.Equal(t, 5, own)
		require.Len(t, got, 2, "one stranger per record")
	}
}

func TestRecordsThatNobodyReadAreNoWitness(t *testing.T) {
	brokers, client := kafka(t)
	run := NewRun(&DuplicateRecords{Brokers: brokers, Topic: topic, Copies: 4}, clock)
	require.NoError(t, run.Inject(t.Context()))
	produce(t, client, 3, 0)
	require.NoError(t, run.Heal(t.Context()))
	require.NoError(t, run.Witness(t.Context()))
	require.Empty(t, run.Record().Witness)
	require.Contains(t, run.Record().Reason, "no consumer group")
}

func TestUnpluggedDuplicatorWitnessesNothing(t *testing.T) {
	brokers, client := kafka(t)
	runs := []*Run{
		NewRun(Unplug(&DuplicateRecords{Brokers: brokers, Topic: topic, Copies: 4}), clock),
		NewRun(Unplug(&ForeignDuplicate{Brokers: brokers, Topic: topic, Member: "event_id"}), clock),
	}
	produce(t, client, 3, 0)
	readAll(t, client)
	for _, r := range runs {
		require.NoError(t, r.Inject(t.Context()))
		require.NoError(t, r.Heal(t.Context()))
		require.NoError(t, r.Witness(t.Context()))
		require.Empty(t, r.Record().Witness, r.Record().Name)
	}
}

func TestGroupLagCountsWhatIsNotCommitted(t *testing.T) {
	brokers, client := kafka(t)
	lag, groups, err := GroupLag(t.Context(), brokers, topic)
	require.NoError(t, err)
	require.Zero(t, groups)
	require.Zero(t, lag)
	produce(t, client, 4, 0)
	readAll(t, client)
	produce(t, client, 3, 4)
	require.Eventually(t, func() bool {
		lag, groups, err = GroupLag(t.Context(), brokers, topic)
		return err == nil && groups == 1 && lag == 3
	}, 5*time.Second, 20*time.Millisecond)
}

func TestRecordThatIsNoEventEndsTheStrangerWithAnError(t *testing.T) {
	brokers, client := kafka(t)
	run := NewRun(&ForeignDuplicate{Brokers: brokers, Topic: topic, Member: "event_id"}, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte("no json")}).FirstErr())
	require.NoError(t, run.Heal(t.Context()))
	require.Equal(t, history.Indeterminate, run.Record().Outcome)
	require.Contains(t, run.Record().Reason, "no JSON object")
}
