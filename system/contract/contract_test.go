package contract_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/contract"
)

// confirmed is an event as another service wrote it long ago: the contract only
// grows, so this body must be read for ever (A2-09).
const confirmed = `{
  "event_id": "01990000-0000-7000-8000-000000000001", "event_type": "BookingConfirmed", "version": 1,
  "occurred_at": "2026-11-30T10:00:00Z", "booking_id": "b1", "generation": 1, "dedupe_key": "ticket:b1",
  "data": {"recipient": "a@example.com", "name": "Ánh", "locale": "vi", "event": "Concert", "seats": ["A1", "A2"],
           "amount": "12.50", "currency": "EUR", "a_field_of_next_year": {"x": 1}},
  "another_new_field": true
}`

func TestOldEventsAreReadAndNewFieldsIgnored(t *testing.T) {
	t.Parallel()
	e, err := contract.DecodeEvent([]byte(confirmed))
	require.NoError(t, err)
	require.Equal(t, contract.Event{
		EventID: "01990000-0000-7000-8000-000000000001", EventType: contract.BookingConfirmed, Version: 1,
		OccurredAt: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), BookingID: "b1", Generation: 1, DedupeKey: "ticket:b1",
		Data: contract.EventData{
			Recipient: "a@example.com", Name: "Ánh", Locale: "vi", Event: "Concert", Seats: []string{"A1", "A2"},
			Amount: "12.50", Currency: "EUR",
		},
	}, e)
}

// Each of these is parked with a reason that a person can act on (A2-12,
// TRAP-2-6).
func TestUnusableEventsSayWhy(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ old, new, want string }{
		"a newer version":     {`"version": 1`, `"version": 2`, "version 2 is not supported"},
		"no version":          {`"version": 1`, `"version": 0`, "version 0 is not supported"},
		"unknown type":        {`"BookingConfirmed"`, `"BookingEaten"`, `event_type "BookingEaten"`},
		"no event id":         {`"01990000-0000-7000-8000-000000000001"`, `""`, "event_id is empty"},
		"no booking":          {`"booking_id": "b1"`, `"booking_id": ""`, "booking_id is empty"},
		"no key":              {`"ticket:b1"`, `""`, "dedupe_key is empty"},
		"generation 0":        {`"generation": 1`, `"generation": 0`, "generation 0 is below 1"},
		"nobody to send to":   {`"a@example.com"`, `""`, "data.recipient is empty"},
		"a number for a text": {`"ticket:b1"`, `7`, "cannot unmarshal"},
		"cut off":             {"\n}", "", "unexpected end"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			body := strings.Replace(confirmed, c.old, c.new, 1)
			require.NotEqual(t, confirmed, body)
			_, err := contract.DecodeEvent([]byte(body))
			require.ErrorIs(t, err, contract.ErrUndecodable)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestACancelNeedsNoRecipient(t *testing.T) {
	t.Parallel()
	body := strings.NewReplacer("BookingConfirmed", "BookingCancelled", "a@example.com", "").Replace(confirmed)
	e, err := contract.DecodeEvent([]byte(body))
	require.NoError(t, err)
	require.False(t, e.EventType.CreatesMail())
}

// No bytes make the decoder panic or return a half-read event as good.
func TestAnyBytesAreReadOrRefused(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		body := []byte(confirmed)
		for range rapid.IntRange(1, 4).Draw(t, "bytes changed") {
			body[rapid.IntRange(0, len(body)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		}
		e, err := contract.DecodeEvent(body)
		if err == nil && e.Validate() != nil {
			t.Fatalf("decoded without an error and not valid: %v", e.Validate())
		}
	})
}

// The message as M6-07 names its fields.
func TestMessageHasTheAgreedFields(t *testing.T) {
	t.Parallel()
	body, err := json.Marshal(contract.Message{
		NotificationID: "n1", DedupeKey: "ticket:b1", Type: contract.TicketConfirmation, Channel: contract.Email,
		To: "a@example.com", Template: contract.TemplateTicketConfirmed,
		Data: contract.MessageData{BookingID: "b1", Event: "Concert", Seats: []string{"A1"}},
	})
	require.NoError(t, err)
	require.JSONEq(t, `{"notificationId":"n1","dedupeKey":"ticket:b1","type":"TICKET_CONFIRMATION","channel":"EMAIL",
		"to":"a@example.com","template":"ticket-confirmed","data":{"bookingId":"b1","event":"Concert","seats":["A1"]}}`, string(body))
	m, err := contract.DecodeMessage(body)
	require.NoError(t, err)
	require.Equal(t, "n1", m.NotificationID)
	_, err = contract.DecodeMessage([]byte(`{}`))
	require.ErrorContains(t, err, "notificationId is empty")
}

func TestNamesOfQueuesAndKeys(t *testing.T) {
	t.Parallel()
	require.Equal(t, "ticket:b1", contract.TicketKey("b1", 1))
	require.Equal(t, "ticket:b1:v2", contract.TicketKey("b1", 2))
	require.Equal(t, "q.notify.retry.10s", contract.RetryQueue(contract.TicketConfirmation, 10*time.Second))
	require.Equal(t, "q.notify.retry.1m", contract.RetryQueue(contract.TicketConfirmation, time.Minute))
	require.Equal(t, "q.notify.retry.marketing.5m", contract.RetryQueue(contract.Marketing, 5*time.Minute))
	require.Equal(t, "notify.retry.ticket.200ms", contract.RetryExchange(contract.TicketConfirmation, 200*time.Millisecond))
	require.Equal(t, contract.QueueTicket, contract.TicketConfirmation.Queue())
	require.Equal(t, contract.QueueMarketing, contract.Marketing.Queue())
}

// Two delays never share a queue, and a name says its delay.
func TestDelayNamesAreReadBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(1, int64(48*time.Hour/time.Millisecond)).Draw(t, "ms")) * time.Millisecond
		back, err := time.ParseDuration(contract.DelayName(d))
		if err != nil || back != d {
			t.Fatalf("%s is named %q, read back as %s (%v)", d, contract.DelayName(d), back, err)
		}
	})
}
