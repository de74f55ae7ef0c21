-- The Program of a job, over what every verb that ends or returns one declares by these names: program, pool, gone, id,
-- front (a job's key), front_token (that job, "" while the caller knows of none), rank.

-- Nothing where the Program is gone, or is a later generation: its job then ends alone. Else the Program, the ticket
-- with which the job waits in its pool, nil for one that is with the rank, and a reply that names what the caller must
-- declare first.
local function concerned(at, job)
  at.rank, at.ms = rank, now_ms()
  local p = program_of(program, pool, gone, id)
  local own = redis.call('HMGET', job, 'generation', 'entry', 'ticket', 'epoch')
  if not p.state or p.gen ~= tonumber(own[1]) then return end
  if p.rank ~= rank then return p, nil, {'moved', p.rank} end
  if own[2] == '0-0' then return p, own[3] end
  if p.inflight > 1 or is_stale(at, p) then return p end
  local ticket = redis.call('LINDEX', pool, 0)
  if not ticket or opened(ticket) == front_token then return p end
  return p, nil, {'front', (opened(ticket))}
end

-- The job has ended.
local function conclude(at, p, ticket, token, how, ended)
  if not p then return end
  if ticket then withdraw(at, p, ticket, how) else rest(at, p, token, how, ended, front) end
  save(p)
  changed(at)
end
