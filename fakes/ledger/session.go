package ledger

// Session is one connection, over: also one that ended before any mail.
type Session struct {
	ID     int64  `json:"id"`
	Client string `json:"client"`
	From   int64  `json:"from"` // monotonic ns
	To     int64  `json:"to"`
	// Last is the last command that was read, "" if none was.
	Last  string `json:"last"`
	Mails int    `json:"mails"`
	TLS   bool   `json:"tls,omitempty"`
	// Fault names the actions that struck outside of any mail, Rules their
	// rules.
	Fault string   `json:"fault,omitempty"`
	Rules []string `json:"rules,omitempty"`
	// PeerClosed: the client closed first.
	PeerClosed bool `json:"peer_closed"`
}

// sessionsKept bounds the sessions in memory; they are no evidence about a
// mail.
const sessionsKept = 4096

type sessions struct {
	n    int64
	last []Session
}

// AddSession keeps a session that is over.
func (l *Ledger) AddSession(s Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions.n++
	if len(l.sessions.last) >= 2*sessionsKept {
		l.sessions.last = append(l.sessions.last[:0:0], l.sessions.last[sessionsKept:]...)
	}
	l.sessions.last = append(l.sessions.last, s)
}

// Sessions returns the latest sessions, in the order in which they ended.
func (l *Ledger) Sessions() []Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Session(nil), l.sessions.last...)
}
