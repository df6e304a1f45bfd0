// Package kafka holds what the services' Kafka consumers share beyond the client
// itself.
package kafka

import "time"

// LeaveLimit is how long a consumer may take to leave its group: a member whose
// group waits for a dead one hears nothing until that one's session is over, 45 s
// at most, and no stop may wait for that.
const LeaveLimit = 5 * time.Second

// Member of a consumer group; *kgo.Client is one.
type Member interface{ CloseAllowingRebalance() }

// Leave closes a member, and returns false when that was not done within limit:
// the process can end all the same, and the broker notices by the session's time.
func Leave(m Member, limit time.Duration) bool {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		m.CloseAllowingRebalance()
	}()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-closed:
		return true
	case <-t.C:
		return false
	}
}
