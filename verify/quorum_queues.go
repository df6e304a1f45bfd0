package verify

import "mailproof/history"

// members is the smallest quorum that outlives one node: of two members one
// alone is no majority.
const members = 3

var quorumQueues = rule{
	name:      "quorum-queues",
	statement: "Every queue is a quorum queue with a leader and three members, as the broker itself lists it (AC2).",
	needs:     needsQueues,
	check: func(e *Evidence, r *report) {
		for i := range e.Final.Queues {
			r.looked(1)
			checkReplicated(&e.Final.Queues[i], r)
		}
	},
}

func checkReplicated(q *history.QueueState, r *report) {
	switch {
	case q.Type != "quorum":
		r.breach("", "queue %s is a %s queue, not a quorum queue", q.Name, q.Type)
	case q.Members != members:
		r.breach("", "queue %s has %d members, not %d", q.Name, q.Members, members)
	case q.Leader == "":
		r.breach("", "queue %s has no leader", q.Name)
	}
}
