package scenarios

import (
	"time"

	"mailproof/faults"
	"mailproof/faults/pgproxy"
)

// postgresLost takes the database away in three ways: the server dies, the
// connections are cut, and the connections are open and carry nothing.
func postgresLost() Scenario {
	const killed, stalled = "postgres-killed", "postgres-stalled"
	s := partScenario("part-postgres", "Postgres is killed and comes back; its connections are reset; they stall",
		killed, "postgres-connections-reset", stalled)
	s.Proves = []string{"A2-03", "A2-10", "M6-10", "OB-02"}
	s.System.PostgresProxy = true
	s.Judge = judgeParts(killed, stalled)
	s.Faults = func(b *Bench) []faults.Fault {
		pg := b.Parts.Stack.Postgres()
		return b.inTurn(
			faults.ServerKilled(killed, pg, outage, faults.PostgresRefuses(pg)),
			faults.ConnectionsReset(b.Parts.Database, 4, 500*time.Millisecond),
			// Longer than the readiness waits for an answer.
			faults.DatabaseStalled(b.Parts.Database, 2*outage),
		)
	}
	return s
}

// commitLost loses the server's answer to what it has committed, at each place
// where a service writes: the booking with its event, the mark of the relay, the
// row of the bridge, the claim, the settle. Whoever takes "no answer" for "not
// done" doubles, and whoever takes it for "done" loses.
func commitLost() Scenario {
	s := partScenario("part-commit-lost", "the answer to a commit is lost at each place that commits",
		"answer-lost-booking", "answer-lost-relay-mark", "answer-lost-insert", "answer-lost-claim", "answer-lost-settle")
	s.Proves = []string{"LAB-ATOM", "A2-08", "A2-10", "M6-10"}
	s.System.PostgresProxy = true
	s.Faults = func(b *Bench) []faults.Fault {
		lost := func(where string, o pgproxy.Order) faults.Act {
			return faults.AnswerLost("answer-lost-"+where, b.Parts.Database, o)
		}
		// The statements as they go over the wire. Of those in a crowd every third.
		return b.inTurn(
			lost("booking", pgproxy.Order{Statement: "commit", After: "INSERT INTO outbox", Count: 10, Every: 3}),
			lost("relay-mark", pgproxy.Order{Statement: "UPDATE outbox SET published_at", Count: 5, Every: 3}),
			lost("insert", pgproxy.Order{Statement: "-- insert\n", Count: 5, Every: 3}),
			lost("claim", pgproxy.Order{Statement: "-- claim\n", Tag: "UPDATE 1", Count: 10, Every: 3}),
			lost("settle", pgproxy.Order{Statement: "-- accepted\n", Tag: "SELECT 1", Count: 10, Every: 3}),
		)
	}
	return s
}
