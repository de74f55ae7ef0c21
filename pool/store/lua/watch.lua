-- watch: a node asks to be told when a job has news. Idempotent; at most 16 nodes, later ones rely on their slow poll.
-- KEY job hash
-- KEY timers zset
-- ARG token str
-- ARG node str
-- ARG hold ms that the node counts as the job's reader from now on, if the job needs one; 0: it is none
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", state} | {"gone"}
local seen = redis.call('HMGET', job, 'state', 'watch')
if not seen[1] then return {'gone'} end
local nodes, count, present = seen[2] or '', 0, false
for name in string.gmatch(nodes, '%S+') do
  count = count + 1
  present = present or name == node
end
if not present and count < 16 then
  redis.call('HSET', job, 'watch', nodes == '' and node or nodes .. ' ' .. node)
end
if hold > 0 then redis.call('ZADD', timers, 'XX', now_ms() + hold, 'reader:' .. token) end
return {'ok', seen[1]}
