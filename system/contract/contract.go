// Package contract holds what the services of the notification system say to
// each other: topics, exchanges, queues, headers, and the JSON of events and
// messages. It holds no behaviour beyond building names and checking bodies.
//
// The contract only grows: a field is added, never renamed or removed, and a
// reader ignores fields it does not know (requirement A2-09). An event whose
// version is newer than [EventVersion] is parked, not guessed at.
//
// Package contract imports nothing of this module. Outside system/ only
// target/ may import it, so that another system can take the target's place.
package contract

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Kafka topics (M6-02, A2-14). Services take the names from their
// configuration; these are the defaults.
const (
	TopicBookingEvents = "booking.events"
	TopicMailEvents    = "mail.events"
)

// EventVersion is the newest event version this code understands.
const EventVersion = 1

// EventType says what happened to a booking.
type EventType string

// The events of booking.events.
const (
	BookingConfirmed EventType = "BookingConfirmed"
	BookingCancelled EventType = "BookingCancelled"
	BookingReopened  EventType = "BookingReopened"
)

// Event is the value of one record of booking.events, keyed by booking_id. It
// is fat: everything that the mail needs is in Data (A2-09).
type Event struct {
	EventID    string    `json:"event_id"` // UUIDv7, made when the outbox row is written
	EventType  EventType `json:"event_type"`
	Version    int       `json:"version"`
	OccurredAt time.Time `json:"occurred_at"`
	BookingID  string    `json:"booking_id"`
	Generation int       `json:"generation"` // 1 at first, one more after each reopen
	DedupeKey  string    `json:"dedupe_key"`
	Data       EventData `json:"data"`
}

// EventData is what a mail is rendered from.
type EventData struct {
	Recipient string   `json:"recipient"`
	Name      string   `json:"name,omitempty"`
	Locale    string   `json:"locale,omitempty"`
	Event     string   `json:"event,omitempty"` // the concert, match or show
	Seats     []string `json:"seats,omitempty"`
	Amount    string   `json:"amount,omitempty"` // decimal, with Currency
	Currency  string   `json:"currency,omitempty"`
}

// ErrUndecodable marks an event body that no retry can repair: it is parked
// with its reason while the partition goes on (A2-12).
var ErrUndecodable = errors.New("undecodable event")

// DecodeEvent reads and checks one record's value. Every error is
// [ErrUndecodable]: the bytes will not get better.
func DecodeEvent(body []byte) (Event, error) {
	var e Event
	if err := json.Unmarshal(body, &e); err != nil {
		return Event{}, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	if err := e.Validate(); err != nil {
		return e, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	return e, nil
}

// Validate names the first field that makes the event unusable, or returns nil.
func (e Event) Validate() error {
	switch {
	case e.Version < 1 || e.Version > EventVersion:
		return fmt.Errorf("version %d is not supported, the newest known is %d", e.Version, EventVersion)
	case e.EventID == "":
		return errors.New("event_id is empty")
	case e.BookingID == "":
		return errors.New("booking_id is empty")
	case e.Generation < 1:
		return fmt.Errorf("generation %d is below 1", e.Generation)
	case e.DedupeKey == "":
		return errors.New("dedupe_key is empty")
	}
	switch e.EventType {
	case BookingConfirmed, BookingReopened:
		if e.Data.Recipient == "" {
			return errors.New("data.recipient is empty")
		}
	case BookingCancelled:
	default:
		return fmt.Errorf("event_type %q is not known", e.EventType)
	}
	return nil
}

// CreatesMail reports whether the event asks for a mail.
func (t EventType) CreatesMail() bool { return t == BookingConfirmed || t == BookingReopened }

// MailEventType says what became of a booking's mail (A2-14).
type MailEventType string

// The events of mail.events.
const (
	EmailSent          MailEventType = "EmailSent"
	EmailFailed        MailEventType = "EmailFailed"    // dead or expired; a replay may still send it
	EmailCancelled     MailEventType = "EmailCancelled" // none was sent and none will be
	EmailCancelTooLate MailEventType = "EmailCancelTooLate"
	// EmailBounced: it was sent, and the recipient's server gave it back.
	EmailBounced MailEventType = "EmailBounced"
)

// MailEvent is the value of one record of mail.events, keyed by booking_id. Of
// the events of one dedupe key the one with the highest version counts; of two
// with the same version EmailCancelTooLate outweighs EmailSent, and EmailBounced
// both.
type MailEvent struct {
	EventID    string        `json:"event_id"`
	EventType  MailEventType `json:"event_type"`
	Schema     int           `json:"schema"`  // of this JSON, see [EventVersion]
	Version    int64         `json:"version"` // of the mail: rises with each transition
	OccurredAt time.Time     `json:"occurred_at"`
	DedupeKey  string        `json:"dedupe_key"`
	BookingID  string        `json:"booking_id"`
	Generation int           `json:"generation"`
	Attempts   int           `json:"attempts"`
	ProviderID string        `json:"provider_id,omitempty"`
}

// DecodeMailEvent reads and checks one record's value. Every error is
// [ErrUndecodable].
func DecodeMailEvent(body []byte) (MailEvent, error) {
	var e MailEvent
	if err := json.Unmarshal(body, &e); err != nil {
		return MailEvent{}, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	if err := e.validate(); err != nil {
		return e, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	return e, nil
}

func (e MailEvent) validate() error {
	switch {
	case e.Schema < 1 || e.Schema > EventVersion:
		return fmt.Errorf("schema %d is not supported, the newest known is %d", e.Schema, EventVersion)
	case e.EventID == "":
		return errors.New("event_id is empty")
	case e.DedupeKey == "":
		return errors.New("dedupe_key is empty")
	case e.BookingID == "":
		return errors.New("booking_id is empty")
	case e.Version < 1:
		return fmt.Errorf("version %d is below 1", e.Version)
	}
	switch e.EventType {
	case EmailSent, EmailFailed, EmailCancelled, EmailCancelTooLate, EmailBounced:
		return nil
	default:
		return fmt.Errorf("event_type %q is not known", e.EventType)
	}
}

// TicketKey is the dedupe key of a booking's ticket mail: it names the intent
// (OB-06). Generation 1 is "ticket:<booking>", a reopened booking's is
// "ticket:<booking>:v<generation>" (C-10).
func TicketKey(bookingID string, generation int) string {
	if generation <= 1 {
		return "ticket:" + bookingID
	}
	return "ticket:" + bookingID + ":v" + strconv.Itoa(generation)
}

// MailType is the kind of mail; it decides lane, policy and queue (M6-06).
type MailType string

// The mail types.
const (
	TicketConfirmation MailType = "TICKET_CONFIRMATION"
	Marketing          MailType = "MARKETING"
)

// Channel is how a notification travels. SMS is stored and parked as
// unsupported.
type Channel string

// The channels.
const (
	Email Channel = "EMAIL"
	SMS   Channel = "SMS"
)

// TemplateTicketConfirmed is the template of a ticket mail.
const TemplateTicketConfirmed = "ticket-confirmed"

// Message is the body of a message in RabbitMQ (M6-07). It is a doorbell: the
// row decides, the message only says which row to look at. To and Data are
// carried for people who look at a queue.
type Message struct {
	NotificationID string      `json:"notificationId"`
	DedupeKey      string      `json:"dedupeKey"`
	Type           MailType    `json:"type"`
	Channel        Channel     `json:"channel"`
	To             string      `json:"to"`
	Template       string      `json:"template"`
	Data           MessageData `json:"data"`
}

// MessageData is the part of the event that the template shows.
type MessageData struct {
	BookingID string   `json:"bookingId"`
	Event     string   `json:"event,omitempty"`
	Seats     []string `json:"seats,omitempty"`
}

// DecodeMessage reads one message's body.
func DecodeMessage(body []byte) (Message, error) {
	var m Message
	if err := json.Unmarshal(body, &m); err != nil {
		return Message{}, fmt.Errorf("message body: %w", err)
	}
	if m.NotificationID == "" {
		return m, errors.New("message body: notificationId is empty")
	}
	return m, nil
}

// Headers of a message. HeaderAttempt is written from the row, for people and
// for the choice of the delay tier; nothing is decided from it.
const (
	HeaderAttempt = "x-attempt"
	HeaderReason  = "x-reason" // on dead letters: why
	HeaderEventID = "x-event-id"
)

// Headers of a mail. The values stay the same over every attempt (OB-03,
// OB-05): a receiver that knows one of them can drop the second copy.
const (
	MailHeaderDedupeKey            = "X-Dedupe-Key"
	MailHeaderResendIdempotencyKey = "Resend-Idempotency-Key"
)

// Exchange is the topic exchange that every notification is published to.
const Exchange = "notify.x"

// Main queues and the dead-letter queue, all quorum (M6-03, M6-04, AC2).
const (
	QueueTicket    = "q.notify.ticket"
	QueueMarketing = "q.notify.marketing"
	QueueDLQ       = "q.notify.dlq"
	ExchangeDLQ    = "notify.dlx"
)

// RoutingKey is the key under which a mail of this type is published to
// [Exchange]. It is kept through the delay tiers, so that an expired message
// finds its way back by the same binding.
func RoutingKey(t MailType) string {
	if t == Marketing {
		return "notify.marketing.email"
	}
	return "notify.ticket.email"
}

// Lane is the short name of a mail type in queue names, metrics and logs.
func (t MailType) Lane() string {
	if t == Marketing {
		return "marketing"
	}
	return "ticket"
}

// Queue is the main queue of the type's lane.
func (t MailType) Queue() string {
	if t == Marketing {
		return QueueMarketing
	}
	return QueueTicket
}

// RetryQueue is the delay queue of one tier. A ticket's tier is
// "q.notify.retry.10s"; marketing has tiers of its own, since a queue's
// messages leave in order and a ticket would wait behind 50,000 of them.
func RetryQueue(t MailType, delay time.Duration) string {
	if t == Marketing {
		return "q.notify.retry.marketing." + DelayName(delay)
	}
	return "q.notify.retry." + DelayName(delay)
}

// RetryExchange is the topic exchange in front of one tier, bound with "#".
func RetryExchange(t MailType, delay time.Duration) string {
	return "notify.retry." + t.Lane() + "." + DelayName(delay)
}

// DelayName writes a delay the way queue names do: "200ms", "10s", "1m", "5m".
func DelayName(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
