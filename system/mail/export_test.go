package mail

// AliveIdle counts the kept connections whose end has not been seen yet.
func (s *ResendSender) AliveIdle() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.idle {
		if c.peek() == peerSilent {
			n++
		}
	}
	return n
}
