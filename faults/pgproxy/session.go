package pgproxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	// maxMessage of the protocol that is taken for one, in bytes: more is not
	// this protocol.
	maxMessage = 64 << 20
	buffer     = 32 << 10
	// maxRemembered statements of one transaction.
	maxRemembered = 100

	// Requests that come in the place of a startup message.
	sslRequest    = 80877103
	gssEncRequest = 80877104
	cancelRequest = 80877102
)

// session is one client's connection and the one to the server behind it.
type session struct {
	proxy          *Proxy
	client, server net.Conn
	once           sync.Once
	gone           chan struct{}

	// What the client has prepared; used by the client's side alone.
	statements map[string]string // name → SQL
	portals    map[string]string // name → SQL
	// before are the statements of the transaction so far.
	before []string

	mu      sync.Mutex
	waiting []*execution // in the order in which answers will come
	failed  bool         // the series under way had an error
}

// execution is a piece of work that the client has asked for.
type execution struct {
	// sync ends a series: the server answers ReadyForQuery. A simple query is
	// work and sync in one.
	sync bool
	loss *Loss  // whose answer shall be lost
	tag  string // of its CommandComplete
}

func newSession(p *Proxy, client, server net.Conn) *session {
	return &session{
		proxy: p, client: client, server: server, gone: make(chan struct{}),
		statements: map[string]string{}, portals: map[string]string{},
	}
}

// cut closes both sides at once.
func (s *session) cut() {
	s.once.Do(func() {
		close(s.gone)
		reset(s.client)
		_ = s.server.Close() // the server ends the session, and with it what is not committed
	})
}

func (s *session) run() {
	defer s.abandon()
	defer s.cut()
	in := bufio.NewReaderSize(s.client, buffer)
	started, err := s.startup(in)
	if err != nil || !started {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { defer s.cut(); s.fromClient(in) })
	both.Go(func() { defer s.cut(); s.fromServer() })
	both.Wait()
}

// abandon gives back orders whose answer never came.
func (s *session) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.waiting {
		if e.loss != nil {
			e.loss.settle(false, "")
		}
	}
	s.waiting = nil
}

// startup passes the startup message on; TLS and GSS encryption are declined. It
// returns false when there is nothing more to pass on: a cancel request.
func (s *session) startup(in *bufio.Reader) (bool, error) {
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(in, head); err != nil {
			return false, err
		}
		length, code := binary.BigEndian.Uint32(head), binary.BigEndian.Uint32(head[4:])
		if length < 8 || length > maxMessage {
			return false, fmt.Errorf("a startup message of %d bytes", length)
		}
		body := make([]byte, length-8)
		if _, err := io.ReadFull(in, body); err != nil {
			return false, err
		}
		if code == sslRequest || code == gssEncRequest {
			if _, err := s.client.Write([]byte{'N'}); err != nil {
				return false, err
			}
			continue
		}
		if _, err := s.server.Write(append(head, body...)); err != nil {
			return false, err
		}
		return code != cancelRequest, nil
	}
}

// message reads one: its type, and all of it as it goes on the wire.
func message(in *bufio.Reader) (kind byte, whole []byte, err error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(in, head); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint32(head[1:])
	if length < 4 || length > maxMessage {
		return 0, nil, fmt.Errorf("a message %q of %d bytes", head[0], length)
	}
	whole = make([]byte, 1+length)
	copy(whole, head)
	_, err = io.ReadFull(in, whole[5:])
	return head[0], whole, err
}

// pass waits while the proxy is stalled; false when the session has ended.
func (s *session) pass(d time.Duration) bool {
	open := s.proxy.gate()
	select {
	case <-open:
	case <-s.gone:
		return false
	}
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.gone:
		return false
	}
}

func (s *session) fromClient(in *bufio.Reader) {
	for {
		kind, whole, err := message(in)
		if err != nil {
			return
		}
		if err := s.note(kind, whole[5:]); err != nil || !s.pass(0) {
			return
		}
		if _, err := s.server.Write(whole); err != nil {
			return
		}
	}
}

var errNotText = errors.New("not this protocol")

// note remembers what an answer to the client's message will be about.
func (s *session) note(kind byte, body []byte) error {
	switch kind {
	case 'P':
		var m pgproto3.Parse
		if err := m.Decode(body); err != nil {
			return errors.Join(errNotText, err)
		}
		s.statements[m.Name] = m.Query
	case 'B':
		var m pgproto3.Bind
		if err := m.Decode(body); err != nil {
			return errors.Join(errNotText, err)
		}
		s.portals[m.DestinationPortal] = s.statements[m.PreparedStatement]
	case 'E':
		var m pgproto3.Execute
		if err := m.Decode(body); err != nil {
			return errors.Join(errNotText, err)
		}
		s.expect(s.portals[m.Portal], false)
	case 'Q':
		var m pgproto3.Query
		if err := m.Decode(body); err != nil {
			return errors.Join(errNotText, err)
		}
		s.expect(m.String, true)
	case 'S':
		s.push(&execution{sync: true})
	}
	return nil
}

func (s *session) expect(statement string, simple bool) {
	e := &execution{sync: simple, loss: s.proxy.arm(statement, s.before)}
	switch word := strings.ToLower(strings.TrimSpace(statement)); {
	case strings.HasPrefix(word, "begin"), strings.HasPrefix(word, "commit"), strings.HasPrefix(word, "rollback"):
		s.before = nil
	case len(s.before) < maxRemembered:
		s.before = append(s.before, statement)
	}
	s.push(e)
}

func (s *session) push(e *execution) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = append(s.waiting, e)
}

// fromServer passes answers on. Those of a series with an answer to lose are
// held until the series is over: then they are lost, or passed on after all.
func (s *session) fromServer() {
	in := bufio.NewReaderSize(s.server, buffer)
	var held []byte
	for {
		kind, whole, err := message(in)
		if err != nil {
			return
		}
		var delay time.Duration
		switch kind {
		case 'C':
			s.completed(tagOf(whole[5:]))
		case 's', 'I': // portal suspended, empty query
			s.completed("")
		case 'E':
			s.fail()
		case 'Z':
			delay = s.proxy.answerDelay()
			if s.ready(whole[5]) {
				return // with everything that is held
			}
		}
		if kind != 'Z' && s.holding() {
			held = append(held, whole...)
			continue
		}
		if !s.pass(delay) {
			return
		}
		if _, err := s.client.Write(append(held, whole...)); err != nil {
			return
		}
		held = nil
	}
}

func tagOf(body []byte) string {
	var m pgproto3.CommandComplete
	if m.Decode(body) != nil {
		return ""
	}
	return string(m.CommandTag)
}

// holding reports whether the series under way has an answer to lose.
func (s *session) holding() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.waiting {
		if e.loss != nil {
			return true
		}
		if e.sync {
			return false
		}
	}
	return false
}

// completed notes the answer to the first execution that has none.
func (s *session) completed(tag string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.waiting {
		if e.tag == "" && (!e.sync || e.loss != nil) {
			e.tag = tag
			return
		}
		if e.sync {
			return
		}
	}
}

func (s *session) fail() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = true
}

// ready ends a series and reports whether its answers are lost: an execution
// whose answer shall be was completed, nothing in the series failed, and the
// session is outside of a transaction, so that it is committed. A transaction
// that failed ends in ROLLBACK.
func (s *session) ready(status byte) (lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.waiting) > 0 {
		e := s.waiting[0]
		s.waiting = s.waiting[1:]
		if e.loss != nil {
			hit := status == 'I' && !s.failed && e.loss.order.counts(e.tag)
			e.loss.settle(hit, e.tag)
			lost = lost || hit
		}
		if e.sync {
			break
		}
	}
	s.failed = false
	return lost
}
