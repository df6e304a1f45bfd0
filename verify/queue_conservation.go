package verify

import (
	"strings"

	"mailproof/history"
)

var queueConservation = rule{
	name:      "queue-conservation",
	statement: "At rest every queue is empty but the dead-letter queue, which holds the dead mails.",
	needs:     needsQueues,
	check: func(e *Evidence, r *report) {
		for i := range e.Final.Queues {
			r.looked(1)
			checkQueue(e, &e.Final.Queues[i], r)
		}
	},
}

func checkQueue(e *Evidence, q *history.QueueState, r *report) {
	if strings.HasSuffix(q.Name, "dlq") {
		if q.Messages != len(e.Final.DLQ) || q.Unacked != 0 {
			r.breach("", "queue %s counts %d messages (%d unacked), and %d could be read", q.Name, q.Messages, q.Unacked, len(e.Final.DLQ))
		}
		return
	}
	if len(e.Final.Pending) > 0 {
		return // quiesced judges a run that did not come to rest
	}
	// messages alone shows what at-least-once dead-lettering holds back: it is
	// neither ready nor unacked.
	if q.Messages != 0 || q.Ready != 0 || q.Unacked != 0 {
		r.breach("", "queue %s is not empty at rest: %d messages, %d ready, %d unacked", q.Name, q.Messages, q.Ready, q.Unacked)
	}
}
