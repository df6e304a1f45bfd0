package outbox

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// producerOpts are those of the producer of one term of leadership. It is
// idempotent with acks=all. A record in flight may be given up after DeliveryTimeout: the
// row stays unpublished and is produced again, so the broker may keep two
// copies with the same event_id, which consumers absorb anyway. In exchange a
// broker that never answers becomes visible in the row instead of a relay that
// hangs.
func producerOpts(cfg *Config) []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(cfg.Brokers...),
		kgo.ClientID("outbox-relay-" + cfg.Instance),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.AllowIdempotentProduceCancellation(),
		kgo.RecordDeliveryTimeout(cfg.DeliveryTimeout),
		kgo.ProduceRequestTimeout(cfg.ProduceTimeout),
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)),
		// A batch is handed over at once, so there is little to wait for.
		kgo.ProducerLinger(lingerFor),
		// A missing topic is waited for: it may be about to be made. Its events
		// are not at fault.
		kgo.UnknownTopicRetries(-1),
		kgo.MaxBufferedRecords(2 * maxBatch),
	}
	return append(opts, cfg.KafkaOpts...)
}

// record makes what is put on the topic. The headers repeat what tools like to
// see without decoding the body.
func (r row) record() *kgo.Record {
	return &kgo.Record{
		Topic: r.topic,
		Key:   []byte(r.key),
		Value: r.payload,
		Headers: []kgo.RecordHeader{
			{Key: "event_id", Value: []byte(r.eventID.String())},
			{Key: "event_type", Value: []byte(r.eventType)},
		},
	}
}

// ownFault reports whether the failure lies in the record itself, so that
// trying again cannot help. Everything else (timeouts, lost connections, too
// few replicas, a missing topic, missing rights) is the broker's or the
// operator's, and must never kill an event: it would kill all of them.
func ownFault(err error) bool {
	for _, own := range []error{
		kerr.MessageTooLarge, kerr.RecordListTooLarge, kerr.InvalidRecord,
		kerr.InvalidTimestamp, kerr.InvalidTopicException,
	} {
		if errors.Is(err, own) {
			return true
		}
	}
	return false
}
