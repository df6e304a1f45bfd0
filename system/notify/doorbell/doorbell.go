// Package doorbell makes the messages that say "look at this row" and gets them
// into a queue.
//
// A message is a doorbell: the row decides (design §3). [Ringer.Ring] returns
// nil only when the broker has confirmed and routed every message; until then
// it repeats what is missing. Repeating can leave copies, which the claim
// absorbs; an unconfirmed publish is unknown, never failed.
//
// It must not touch rows.
package doorbell

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/logging"
	"mailproof/system/notify/patience"
)

// Bell is what a message says of a row.
type Bell struct {
	ID        uuid.UUID
	DedupeKey string
	EventID   string
	BookingID string
	Type      contract.MailType
	Channel   contract.Channel
	Recipient string
	Template  string // empty: that of the payload, or a ticket's
	Payload   []byte
	Attempts  int
}

// Of is the bell of a row.
func Of(r delivery.Row) Bell {
	b := Bell{
		ID: r.ID, DedupeKey: r.DedupeKey, BookingID: r.BookingID, Type: r.Type,
		Channel: r.Channel, Recipient: r.Recipient, Payload: r.Payload, Attempts: r.Attempts,
	}
	if r.EventID != nil {
		b.EventID = *r.EventID
	}
	return b
}

// Again is the bell of a message that goes round once more, for a row that
// waits; attempts is the row's.
func Again(id uuid.UUID, m contract.Message, t contract.MailType, eventID string, attempts int) (Bell, error) {
	payload, err := json.Marshal(contract.EventData{Event: m.Data.Event, Seats: m.Data.Seats})
	if err != nil {
		return Bell{}, fmt.Errorf("message of %s: %w", m.DedupeKey, err)
	}
	return Bell{
		ID: id, DedupeKey: m.DedupeKey, EventID: eventID, BookingID: m.Data.BookingID, Type: t,
		Channel: m.Channel, Recipient: m.To, Template: m.Template, Payload: payload, Attempts: attempts,
	}, nil
}

// body is the JSON of requirement M6-07.
func (b Bell) body() []byte {
	var data contract.EventData
	// A payload that cannot be read leaves event and seats out: they are for
	// people who look at a queue.
	_ = json.Unmarshal(b.Payload, &data)
	if b.Template == "" {
		b.Template = templateOf(b)
	}
	body, err := json.Marshal(contract.Message{
		NotificationID: b.ID.String(), DedupeKey: b.DedupeKey, Type: b.Type, Channel: b.Channel,
		To: b.Recipient, Template: b.Template,
		Data: contract.MessageData{BookingID: b.BookingID, Event: data.Event, Seats: data.Seats},
	})
	if err != nil {
		// Strings and a list of strings always encode.
		return []byte(`{"notificationId":"` + b.ID.String() + `"}`)
	}
	return body
}

// templateOf is for people too: a mail is rendered from its row.
func templateOf(b Bell) string {
	if b.Type != contract.Marketing {
		return contract.TemplateTicketConfirmed
	}
	m, err := contract.DecodeCampaignMail(b.Payload)
	if err != nil {
		return ""
	}
	return m.Template
}

func (b Bell) headers() map[string]any {
	h := map[string]any{contract.HeaderAttempt: int32(b.Attempts)}
	if b.EventID != "" {
		h[contract.HeaderEventID] = b.EventID
	}
	return h
}

// Main is the message to the row's main queue.
func Main(b Bell) amqp.Message {
	return amqp.Message{
		Exchange: contract.Exchange, RoutingKey: contract.RoutingKey(b.Type),
		ID: uuid.NewString(), Headers: b.headers(), Body: b.body(),
	}
}

// Later is the message that comes back to the main queue once tier has passed.
func Later(b Bell, tier time.Duration) amqp.Message {
	m := Main(b)
	m.Exchange = contract.RetryExchange(b.Type, tier)
	return m
}

// Dead is the dead letter of a row: a pointer to it, with the reason.
func Dead(b Bell, reason string) amqp.Message {
	m := Main(b)
	m.Exchange = contract.ExchangeDLQ
	m.Headers[contract.HeaderReason] = clip(reason)
	return m
}

// Unreadable is the dead letter of a message that no worker can read; the body
// is kept as it came.
func Unreadable(t contract.MailType, body []byte, reason string) amqp.Message {
	return amqp.Message{
		Exchange: contract.ExchangeDLQ, RoutingKey: contract.RoutingKey(t), ID: uuid.NewString(),
		Headers: map[string]any{contract.HeaderReason: clip(reason)}, Body: body,
	}
}

// clip keeps a server's reply from filling a header.
func clip(s string) string { return logging.Plain(s, 500) }

// Tier is the delay tier that covers wait: the shortest that is long enough,
// else the longest, after which the row sends the message round again. tiers
// are in rising order and not empty.
func Tier(tiers []time.Duration, wait time.Duration) time.Duration {
	for _, t := range tiers {
		if t >= wait {
			return t
		}
	}
	return tiers[len(tiers)-1]
}

// Publisher is the session layer's.
type Publisher interface {
	Publish(ctx context.Context, msgs []amqp.Message) []error
}

// Ringer publishes until confirmed.
type Ringer struct {
	Publisher Publisher
	Backoff   patience.Backoff
	Log       *slog.Logger
	Count     patience.Counter
}

// Ring returns nil when every message is confirmed and routed, or ctx's error.
func (r Ringer) Ring(ctx context.Context, msgs ...amqp.Message) error {
	left := msgs
	retry := patience.Retrier{Backoff: r.Backoff, Log: r.Log, Count: r.Count}
	return retry.Do(ctx, "publish", nil, func(ctx context.Context) error {
		if len(left) == 0 {
			return nil
		}
		results := r.Publisher.Publish(ctx, left)
		if len(results) != len(left) {
			return fmt.Errorf("publisher answered for %d of %d messages", len(results), len(left))
		}
		var again []amqp.Message
		var first error
		for i, err := range results {
			if err == nil {
				continue
			}
			again = append(again, left[i])
			if first == nil {
				first = err // the others say the same
			}
		}
		left = again
		if first != nil {
			return fmt.Errorf("%d of %d messages: %w", len(left), len(results), first)
		}
		return nil
	})
}
