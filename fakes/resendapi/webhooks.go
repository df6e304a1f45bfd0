package resendapi

import (
	"container/heap"
	"net/url"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// eventTypes are the events that a webhook can ask for. Those of contacts,
// domains and suppressions are accepted and never happen here.
var eventTypes = []string{
	"email.sent", "email.scheduled", "email.delivered", "email.delivery_delayed", "email.complained",
	"email.bounced", "email.opened", "email.clicked", "email.received", "email.failed", "email.suppressed",
	"contact.created", "contact.updated", "contact.deleted",
	"domain.created", "domain.updated", "domain.deleted",
	"suppression.added", "suppression.removed",
}

// hooks are the webhooks of a server.
type hooks struct {
	s      *Server
	client *poster
	any    atomic.Bool // there is at least one

	mu       sync.Mutex
	next     int64 // serial of webhooks
	messages int64 // serial of messages
	all      map[int64]*webhook
	log      []Delivery
	closed   bool
}

// webhook is one subscription; its lane delivers what falls due, one message
// after another.
type webhook struct {
	serial  int64
	id      string
	secret  string
	created time.Time
	lane    *lane

	endpoint string // guarded by hooks.mu, as what follows
	events   []string
	status   string
}

func newHooks(s *Server) *hooks {
	return &hooks{s: s, client: newPoster(s.opt), all: map[int64]*webhook{}}
}

// webhooksMax bounds the webhooks of a server.
const webhooksMax = 100

type webhookBody struct {
	Endpoint *string   `json:"endpoint"`
	Events   *[]string `json:"events"`
	Status   *string   `json:"status"`
}

func (b webhookBody) check() *APIError {
	if b.Endpoint != nil {
		u, err := url.Parse(*b.Endpoint)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return must(422, "validation_error").saying("Invalid `endpoint` field: it must be a URL.")
		}
	}
	if b.Events != nil {
		for _, e := range *b.Events {
			if !slices.Contains(eventTypes, e) {
				return must(422, "validation_error").saying("Invalid `events` field: there is no event `%s`.", e)
			}
		}
		if len(*b.Events) == 0 {
			return must(422, "missing_required_field").saying("Missing `events` field.")
		}
	}
	if b.Status != nil && *b.Status != "enabled" && *b.Status != "disabled" {
		return must(422, "validation_error").saying("Invalid `status` field: it must be `enabled` or `disabled`.")
	}
	return nil
}

func (c *call) createWebhook() (any, *APIError) {
	var ask webhookBody
	if err := c.read(&ask); err != nil {
		return nil, err
	}
	switch {
	case ask.Endpoint == nil:
		return nil, must(422, "missing_required_field").saying("Missing `endpoint` field.")
	case ask.Events == nil:
		return nil, must(422, "missing_required_field").saying("Missing `events` field.")
	}
	if err := ask.check(); err != nil {
		return nil, err
	}
	h, err := c.s.hooks.add(*ask.Endpoint, *ask.Events)
	if err != nil {
		return nil, err
	}
	return struct {
		changed
		SigningSecret string `json:"signing_secret"`
	}{changed{"webhook", h.id}, h.secret}, nil
}

func (k *hooks) add(endpoint string, events []string) (*webhook, *APIError) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || len(k.all) >= webhooksMax {
		return nil, must(422, "validation_error").saying("There cannot be more than %d webhooks.", webhooksMax)
	}
	k.next++
	d := ids{k.s.opt.Seed ^ 0x77686f6f6b} // ids unlike those of mails
	h := &webhook{
		serial: k.next, id: d.uuid(k.next), secret: d.secret(k.next), created: k.s.wall(),
		endpoint: endpoint, events: events, status: "enabled",
	}
	h.lane = newLane(k, h)
	k.all[h.serial] = h
	k.any.Store(true)
	return h, nil
}

// shown is a webhook as the API gives it.
type shown struct {
	Object        string   `json:"object,omitempty"`
	ID            string   `json:"id"`
	CreatedAt     string   `json:"created_at"`
	Status        string   `json:"status"`
	Endpoint      string   `json:"endpoint"`
	Events        []string `json:"events"`
	SigningSecret string   `json:"signing_secret,omitempty"`
}

func (h *webhook) show() shown {
	return shown{ID: h.id, CreatedAt: stamp(h.created), Status: h.status, Endpoint: h.endpoint, Events: h.events}
}

func (c *call) listWebhooks() (any, *APIError) {
	p, err := c.page()
	if err != nil {
		return nil, err
	}
	all := c.s.hooks.list()
	if cursor := p.after + p.before; cursor != "" {
		i := slices.IndexFunc(all, func(x shown) bool { return x.ID == cursor })
		switch {
		case i < 0:
			return nil, must(404, "not_found").saying("Webhook not found")
		case p.after != "":
			all = all[i+1:]
		default:
			all = all[max(0, i-p.limit):i]
		}
	}
	more := len(all) > p.limit
	return page[shown]{"list", more, all[:min(len(all), p.limit)]}, nil
}

func (k *hooks) list() []shown {
	k.mu.Lock()
	defer k.mu.Unlock()
	hooks := make([]*webhook, 0, len(k.all))
	for _, h := range k.all {
		hooks = append(hooks, h)
	}
	sort.Slice(hooks, func(i, j int) bool { return hooks[i].serial > hooks[j].serial })
	out := make([]shown, 0, len(hooks))
	for _, h := range hooks {
		out = append(out, h.show())
	}
	return out
}

// with runs f on a webhook under the lock.
func (k *hooks) with(id string, f func(*webhook)) *APIError {
	if _, ok := parseUUID(id); !ok {
		return must(422, "invalid_parameter").saying("The `id` must be a valid UUID.")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.all {
		if h.id == id {
			f(h)
			return nil
		}
	}
	return must(404, "not_found").saying("Webhook not found")
}

func (c *call) getWebhook(id string) (any, *APIError) {
	var x shown
	err := c.s.hooks.with(id, func(h *webhook) {
		x = h.show()
		x.Object, x.SigningSecret = "webhook", h.secret
	})
	return x, err
}

func (c *call) updateWebhook(id string) (any, *APIError) {
	var ask webhookBody
	if err := c.read(&ask); err != nil {
		return nil, err
	}
	if err := ask.check(); err != nil {
		return nil, err
	}
	err := c.s.hooks.with(id, func(h *webhook) {
		if ask.Endpoint != nil {
			h.endpoint = *ask.Endpoint
		}
		if ask.Events != nil {
			h.events = *ask.Events
		}
		if ask.Status != nil {
			h.status = *ask.Status
		}
	})
	return changed{"webhook", id}, err
}

func (c *call) deleteWebhook(id string) (any, *APIError) {
	k := c.s.hooks
	var gone *webhook
	err := k.with(id, func(h *webhook) {
		gone = h
		delete(k.all, h.serial)
		k.any.Store(len(k.all) > 0)
	})
	if gone != nil {
		gone.lane.close()
	}
	return struct {
		changed
		Deleted bool `json:"deleted"`
	}{changed{"webhook", id}, true}, err
}

// happening is one event of a mail.
type happening struct {
	event string
	due   time.Duration
}

// mail plans the events of a mail that was kept.
func (k *hooks) mail(serial int64, key string, m *mail, e entry) {
	if !k.any.Load() {
		return
	}
	var plan []happening
	if e.due != e.at {
		plan = append(plan, happening{"email.scheduled", e.at})
	}
	if e.fate != fateSuppressed {
		plan = append(plan, happening{"email.sent", e.due})
	}
	for _, st := range e.steps() {
		plan = append(plan, happening{"email." + st.event, e.due + st.after})
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range plan {
		var body []byte
		for _, h := range k.all {
			if h.status != "enabled" || !slices.Contains(h.events, p.event) {
				continue
			}
			if body == nil {
				body = k.payload(serial, m, e, p)
			}
			k.messages++
			h.lane.push(&message{
				id: ids{k.s.opt.Seed ^ 0x6d7367}.message(k.messages), event: p.event, body: body, due: p.due, serial: serial,
				plan: e.plan, planned: p.event != "email.scheduled", key: key, to: m.recipients(), from: bare(m.From),
			})
		}
	}
}

// planned moves the events of a mail that got another time.
func (k *hooks) planned(serial int64, by time.Duration, plan uint16) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.all {
		h.lane.move(serial, by, plan)
	}
}

func (k *hooks) wake() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.all {
		h.lane.poke()
	}
}

// reset forgets what waits and what was delivered; webhooks stay.
func (k *hooks) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.log, k.messages = nil, 0
	for _, h := range k.all {
		h.lane.empty()
	}
}

func (k *hooks) close() {
	k.mu.Lock()
	k.closed = true
	lanes := make([]*lane, 0, len(k.all))
	for _, h := range k.all {
		lanes = append(lanes, h.lane)
	}
	k.mu.Unlock()
	for _, l := range lanes {
		l.close()
	}
	k.client.close()
}

// message is one event on its way to one webhook.
type message struct {
	id      string
	event   string
	body    []byte
	due     time.Duration // on the movable clock
	order   int64
	attempt int // tries so far
	serial  int64
	plan    uint16
	planned bool // void when the mail's plan changed
	key     string
	to      []string
	from    string
	asked   bool // the rules have been asked for this try
	strikes []Action
	fault   string
	passed  bool // waits for another one to overtake it
}

// messagesMax bounds what waits for one webhook; more is lost, and logged.
const messagesMax = 100_000

// lane is the queue of one webhook, by due time.
type lane struct {
	k    *hooks
	hook *webhook
	stop chan struct{}
	done chan struct{}
	kick chan struct{}

	mu    sync.Mutex
	order int64
	queue queue
	over  bool
}

func newLane(k *hooks, h *webhook) *lane {
	l := &lane{k: k, hook: h, stop: make(chan struct{}), done: make(chan struct{}), kick: make(chan struct{}, 1)}
	go l.run()
	return l
}

func (l *lane) push(m *message) {
	l.mu.Lock()
	full := len(l.queue) >= messagesMax
	if !full && !l.over {
		if m.order == 0 {
			l.order++
			m.order = l.order
		}
		heap.Push(&l.queue, m)
	}
	l.mu.Unlock()
	if full {
		go l.k.note(l.hook, m, Delivery{Error: "lost: too many messages wait"})
	}
	l.poke()
}

func (l *lane) poke() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (l *lane) empty() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = nil
}

// move shifts the waiting events of a mail.
func (l *lane) move(serial int64, by time.Duration, plan uint16) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.queue {
		if m.serial == serial && m.planned {
			m.due += by
			m.plan = plan
		}
	}
	heap.Init(&l.queue)
	l.poke()
}

// overtaken lets those that waited for another one go.
func (l *lane) overtaken(now time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.queue {
		if m.passed {
			m.due = now
		}
	}
	heap.Init(&l.queue)
}

func (l *lane) close() {
	l.mu.Lock()
	was := l.over
	l.over = true
	l.mu.Unlock()
	if !was {
		close(l.stop)
	}
	<-l.done
}

func (l *lane) run() {
	defer close(l.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		m, wait := l.next()
		if m != nil {
			l.deliver(m)
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-l.kick:
		case <-l.stop:
			return
		}
	}
}

// next takes the message that is due, or says how long to wait.
func (l *lane) next() (*message, time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over || len(l.queue) == 0 {
		return nil, time.Hour
	}
	if wait := l.queue[0].due - l.k.s.engine.Now(); wait > 0 {
		return nil, wait
	}
	m, _ := heap.Pop(&l.queue).(*message)
	return m, 0
}

// queue is a heap by due time, then by order of entering.
type queue []*message

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if q[i].due != q[j].due {
		return q[i].due < q[j].due
	}
	return q[i].order < q[j].order
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any) {
	if m, ok := x.(*message); ok {
		*q = append(*q, m)
	}
}

func (q *queue) Pop() any {
	old := *q
	m := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return m
}
