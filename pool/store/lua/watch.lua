-- watch: a node asks to be told when a job has news. Idempotent; at most 16 nodes, later ones rely on their slow poll.
-- KEY job hash
-- ARG node str
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
return {'ok', seen[1]}
