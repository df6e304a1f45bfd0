package booking

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"pgregory.net/rapid"

	"mailproof/system/contract"
)

func mailEvent(booking string, version int64, kind contract.MailEventType) contract.MailEvent {
	return contract.MailEvent{
		EventID: "e", EventType: kind, Schema: 1, Version: version, OccurredAt: time.Now(),
		DedupeKey: contract.TicketKey(booking, 1), BookingID: booking, Generation: 1,
	}
}

// Whatever order the events come in, and however often, the newest counts.
func TestTheNewestMailEventCounts(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	mails := Mails{Pool: f.pool}
	b := Booking{ID: "b1", Generation: 1, Status: Cancelled}
	told := []contract.MailEvent{
		mailEvent("b1", 3, contract.EmailFailed),
		mailEvent("b1", 6, contract.EmailSent),
		mailEvent("b1", 6, contract.EmailCancelTooLate),
	}
	rapid.Check(t, func(t *rapid.T) {
		told, want := told, MailTooLate
		if rapid.Bool().Draw(t, "it came back") {
			told, want = append(told[:len(told):len(told)], mailEvent("b1", 6, contract.EmailBounced)), MailBounced
		}
		if _, err := f.pool.Exec(context.Background(), `DELETE FROM booking_mails`); err != nil {
			t.Fatal(err)
		}
		order := append(rapid.Permutation(told).Draw(t, "order"), rapid.SliceOfN(rapid.SampledFrom(told), 0, 3).Draw(t, "repeated")...)
		for _, e := range order {
			if err := mails.Hear(context.Background(), []contract.MailEvent{e}); err != nil {
				t.Fatal(err)
			}
		}
		mail, err := f.service.Mail(context.Background(), b)
		if err != nil || mail.Status != want {
			t.Fatalf("%v, %v", mail, err)
		}
	})
}

// TRAP-C2-6: what is not known is not told, and a reopened booking's mail is
// another one.
func TestGetTellsTheMailOnlyWhenItIsKnown(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	a := newAPI(t, f.service)
	mail := func() string {
		t.Helper()
		resp, err := http.Get(a.url + "/bookings/b1")
		require.NoError(t, err)
		status, body := read(t, resp)
		require.Equal(t, http.StatusOK, status)
		var got struct{ Mail *Mail }
		require.NoError(t, json.Unmarshal([]byte(body), &got))
		if got.Mail == nil {
			return ""
		}
		return string(got.Mail.Status)
	}
	a.post(t, "/bookings", `{"id":"b1","recipient":"a@example.test"}`)
	require.Empty(t, mail())
	a.post(t, "/bookings/b1/confirm", "")
	require.Equal(t, "pending", mail())
	a.post(t, "/bookings/b1/cancel", "")
	require.Equal(t, "pending", mail(), "cancelled is the booking; of the mail nobody knows")
	require.NoError(t, Mails{Pool: f.pool}.Hear(t.Context(), []contract.MailEvent{mailEvent("b1", 2, contract.EmailCancelled)}))
	require.Equal(t, "cancelled", mail())
	a.post(t, "/bookings/b1/reopen", "")
	require.Equal(t, "pending", mail())
}

// An event that nobody can read does not hold the partition up, and what was
// noted is not read again.
func TestMailEventsAreHeard(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	kafka, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "mail.events"))
	require.NoError(t, err)
	defer kafka.Close()
	producer, err := kgo.NewClient(kgo.SeedBrokers(kafka.ListenAddrs()...), kgo.DefaultProduceTopic("mail.events"))
	require.NoError(t, err)
	defer producer.Close()
	body, err := json.Marshal(mailEvent("b1", 3, contract.EmailSent))
	require.NoError(t, err)
	for _, value := range []string{"not JSON", `{"schema":99}`, string(body)} {
		require.NoError(t, producer.ProduceSync(t.Context(), kgo.StringRecord(value)).FirstErr())
	}
	reg := prometheus.NewRegistry()
	m := NewMailEvents(MailEventsConfig{
		Brokers: kafka.ListenAddrs(), Topic: "mail.events", Group: "booking", Instance: "t",
		Mails: Mails{Pool: f.pool}, Log: slog.New(slog.DiscardHandler), Timeout: time.Second,
	}, reg)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	require.Eventually(t, func() bool {
		mail, err := f.service.Mail(t.Context(), Booking{ID: "b1", Generation: 1, Status: Confirmed})
		return err == nil && mail.Status == MailSent
	}, 30*time.Second, 20*time.Millisecond)
	stop()
	require.NoError(t, <-done)
	families, err := reg.Gather()
	require.NoError(t, err)
	text := ""
	for _, fam := range families {
		text += fam.String()
	}
	require.True(t, strings.Contains(text, "undecodable"), text)
}
